"use strict";
// Charts of the report: plain SVG from the figures in #data. Nothing is fetched and nothing leaves the page.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  let clips = 0;

  // Small tools ------------------------------------------------------------------------------------------------------
  const svg = (parent, name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };
  const html = (parent, name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };
  const superscript = (power) => String(power).replace(/[-0-9]/g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  const number = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) {
      const [digits, power] = value.toExponential(2).split("e");
      return `${digits}·10${superscript(Number(power))}`;
    }
    return String(Number(value.toPrecision(5)));
  };

  // Axes -------------------------------------------------------------------------------------------------------------
  const scale = ([low, high], [from, to], log) => {
    const f = log ? Math.log10 : (v) => v;
    const [a, b] = [f(low), f(high)];
    const map = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
    map.invert = (p) => { const v = a + ((p - from) / (to - from)) * (b - a); return log ? 10 ** v : v; };
    return map;
  };
  const linearTicks = (low, high, count) => {
    const raw = (high - low) / count;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = unit * [1, 2, 5, 10].find((m) => m * unit >= raw * 0.999);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      const value = i * step;
      const plain = places <= 6 && Math.abs(value) < 1e6;
      ticks.push([value, plain ? value.toFixed(places) : number(value)]);
    }
    return ticks;
  };
  const logTicks = (low, high, count) => {
    const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const name = (p) => (a >= -3 && b <= 4 ? String(Number((10 ** p).toPrecision(1))) : `10${superscript(p)}`);
    if (b - a >= 2) {
      const stride = Math.ceil((b - a + 1) / count);
      return Array.from({ length: b - a + 1 }, (_, i) => a + i).filter((p) => (p - a) % stride === 0)
        .map((p) => [10 ** p, name(p)]);
    }
    const fine = [];
    for (let p = a - 1; p <= b + 1; p++) {
      for (const m of [1, 2, 5]) if (m * 10 ** p >= low && m * 10 ** p <= high) fine.push([m * 10 ** p, number(m * 10 ** p)]);
    }
    return fine.length >= 3 ? fine : linearTicks(low, high, count).filter(([v]) => v > 0);
  };
  // From which values the vertical axis is chosen: all of them, or, zoomed, those after the first three tenths of the run.
  const limits = (lines, how, target) => {
    const end = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
    let values = [];
    for (const { x, band } of lines) {
      x.forEach((at, i) => {
        if (how !== "zoomed" || at >= 0.3 * end) for (const row of band) if (row[i] !== null) values.push(row[i]);
      });
    }
    if (target !== null) values.push(target);
    if (how === "log") values = values.filter((v) => v > 0);
    if (!values.length) return null;
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (low === high) { const d = Math.abs(low) * 0.1 || 1; low -= d; high += d; }
    if (how === "log") { const m = (high / low) ** 0.04; return [low / m, high * m]; }
    const margin = 0.05 * (high - low);
    return [low - margin, high + margin];
  };

  // One chart --------------------------------------------------------------------------------------------------------
  const pieces = (band) => {
    const found = [];
    let piece = null;
    band[0].forEach((v, i) => {
      if (v === null) piece = null;
      else if (piece) piece.push(i);
      else found.push((piece = [i]));
    });
    return found;
  };
  const seriesOf = (chart) => {
    const { section, host, state } = chart;
    const quantity = chart.quantity();
    return section.series.filter((s) => !state.hidden.has(s.name) && s.bands[quantity])
      .map((s) => ({ ...s, x: s[chart.across()], band: s.bands[quantity] }))
      .filter((s) => s.x.length && s.x.every((v) => v !== null) && !host.closest("[hidden]"));
  };
  const draw = (chart) => {
    const { host, section } = chart;
    const width = Math.floor(host.clientWidth);
    if (!width) return;
    chart.plot.replaceChildren();
    chart.tip.hidden = true;
    const lines = seriesOf(chart), across = chart.across(), quantity = chart.quantity();
    const target = section.target && quantity in section.target ? section.target[quantity] : null;
    let how = chart.how();
    let domain = lines.length ? limits(lines, how, target) : null;
    if (!domain && lines.length) domain = limits(lines, (how = "linear"), target);
    host.dataset.scale = how;
    if (!domain) {
      const timed = across !== "seconds" || section.series.some((s) => s.seconds[0] !== null);
      html(chart.plot, "p", "nothing", timed ? "Nothing to show: choose an order above." : "These runs shared the machine, so their seconds are left out.");
      chart.view = null;
      return;
    }
    const height = width < 420 ? 230 : 270;
    const rows = how === "log" ? logTicks(...domain, 6) : linearTicks(...domain, 5);
    const left = 16 + 6.7 * Math.max(...rows.map(([, label]) => label.length)), right = 14, top = 10, bottom = 40;
    const ends = across === "workers"
      ? [Math.min(...lines.map((l) => l.x[0])) / 1.15, Math.max(...lines.map((l) => l.x[l.x.length - 1])) * 1.15]
      : [0, Math.max(...lines.map((l) => l.x[l.x.length - 1])) || 1];
    const x = scale(ends, [left, width - right], across === "workers");
    const y = scale(domain, [height - bottom, top], how === "log");
    const columns = across === "workers"
      ? [...new Set(lines.flatMap((l) => l.x))].sort((a, b) => a - b).map((v) => [v, String(v)])
      : linearTicks(...ends, Math.max(3, Math.min(8, Math.floor((width - left) / 80))));
    const frame = svg(chart.plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.summary });
    for (const [value, label] of rows) {
      svg(frame, "line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) });
      svg(frame, "text", { class: "tick y", x: left - 8, y: y(value) + 4 }, label);
    }
    for (const [value, label] of columns) {
      svg(frame, "line", { class: "mark", x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4 });
      svg(frame, "text", { class: "tick x", x: x(value), y: height - bottom + 18 }, label);
    }
    svg(frame, "line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
    svg(frame, "text", { class: "label", x: (left + width - right) / 2, y: height - 4 }, across);
    const clip = `clip-${++clips}`;
    svg(svg(frame, "clipPath", { id: clip }), "rect", { x: left, y: top - 4, width: width - left - right + 4, height: height - top - bottom + 4 });
    const area = svg(frame, "g", { "clip-path": `url(#${clip})` });
    const at = (line, row, i) => `${x(line.x[i]).toFixed(1)},${y(Math.max(line.band[row][i], how === "log" ? domain[0] / 9 : -Infinity)).toFixed(1)}`;
    if (target !== null) svg(area, "line", { class: "target", x1: left, x2: width - right, y1: y(target), y2: y(target) });
    for (const line of [...lines].reverse()) { // the first ones on top
      const group = svg(area, "g", { class: `series look-${line.look}`, "data-contender": line.name });
      for (const piece of pieces(line.band)) {
        if (piece.length > 1 && across !== "workers") {
          const up = piece.map((i) => at(line, 2, i)), down = piece.map((i) => at(line, 1, i)).reverse();
          svg(group, "path", { class: "band", d: `M${up.concat(down).join("L")}Z` });
        }
        if (across === "workers") for (const i of piece) {
          svg(group, "path", { class: "whisker", d: `M${at(line, 1, i)}L${at(line, 2, i)}` });
        }
        if (across === "workers" || piece.length === 1) for (const i of piece) {
          svg(group, "circle", { class: "point", cx: x(line.x[i]), cy: y(line.band[0][i]), r: 4 });
        }
        svg(group, "path", { class: "line", d: `M${piece.map((i) => at(line, 0, i)).join("L")}` });
      }
      if (target !== null && line.hit && line.hit[across] !== null && line.name !== section.rival) {
        svg(group, "path", { class: "hit", d: `M${x(line.hit[across])},${y(target) + 5}V${height - bottom}` });
        svg(group, "circle", { class: "hit", cx: x(line.hit[across]), cy: y(target), r: 4.5 });
      }
    }
    if (target !== null) {
      const below = y(target) + 15 < height - bottom; // where lines have not come down to yet
      svg(area, "text", { class: "target", x: left + 5, y: y(target) + (below ? 13 : -6) }, `${section.rival}'s final loss`);
    }
    const cursor = svg(frame, "g", { class: "cursor", visibility: "hidden" });
    chart.view = { lines, across, x, y, left, right, top, bottom, width, height, cursor, domain };
  };

  // Reading values off: mouse, finger or arrow keys --------------------------------------------------------------------
  const nearest = (x, value) => x.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(x[best] - value) ? i : best), 0);
  const read = (chart, value) => {
    const view = chart.view;
    if (!view) return;
    view.cursor.replaceChildren();
    view.cursor.setAttribute("visibility", "visible");
    chart.tip.replaceChildren();
    const longest = view.lines.reduce((a, b) => (b.x[b.x.length - 1] > a.x[a.x.length - 1] ? b : a));
    const where = longest.x[nearest(longest.x, value)];
    chart.at = where;
    html(chart.tip, "p", "when", view.across === "workers" ? `${where} workers` : view.across === "epochs" ? `epoch ${number(where)}` : `${number(where)} seconds`);
    svg(view.cursor, "line", { x1: view.x(where), x2: view.x(where), y1: view.top, y2: view.height - view.bottom });
    for (const line of view.lines) {
      const i = nearest(line.x, where);
      const [mean, low, high] = line.band.map((row) => row[i]);
      if (mean === null) continue;
      const row = html(chart.tip, "p", `value look-${line.look}`);
      html(row, "i", "swatch");
      html(row, "span", "name", line.name);
      html(row, "b", "", number(mean));
      if (low !== high) html(row, "small", "", `${number(low)} to ${number(high)}`);
      if (mean >= view.domain[0] && mean <= view.domain[1]) {
        svg(view.cursor, "circle", { class: `look-${line.look}`, cx: view.x(line.x[i]), cy: view.y(mean), r: 4 });
      }
    }
    chart.tip.hidden = false;
    const place = view.x(where), own = chart.tip.offsetWidth;
    const wanted = place > view.width / 2 ? place - own - 12 : place + 12;
    chart.tip.style.left = `${Math.max(0, Math.min(wanted, view.width - own))}px`;
  };
  const leave = (chart) => {
    chart.tip.hidden = true;
    if (chart.view) chart.view.cursor.setAttribute("visibility", "hidden");
  };
  const listen = (chart) => {
    const move = (event) => {
      const inside = event.clientX - chart.plot.getBoundingClientRect().left;
      if (chart.view) read(chart, chart.view.x.invert(inside));
    };
    chart.plot.addEventListener("pointermove", move);
    chart.plot.addEventListener("pointerdown", move);
    chart.plot.addEventListener("pointerleave", () => leave(chart));
    chart.host.addEventListener("blur", () => leave(chart));
    chart.host.addEventListener("keydown", (event) => {
      if (!chart.view || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
      event.preventDefault();
      if (event.key === "Escape") return leave(chart);
      const points = chart.view.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
      const now = chart.tip.hidden ? -1 : nearest(points, chart.at);
      const next = { ArrowLeft: now < 0 ? points.length - 1 : now - 1, ArrowRight: now + 1, Home: 0, End: points.length - 1 }[event.key];
      read(chart, points[Math.max(0, Math.min(points.length - 1, next))]);
    });
  };

  // Sections: controls above, charts below -----------------------------------------------------------------------------
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      target.chart.visible = isIntersecting;
      if (isIntersecting && target.chart.stale) { target.chart.stale = false; draw(target.chart); }
    }
  }, { rootMargin: "300px" });
  const refresh = (chart) => { if (chart.visible) draw(chart); else chart.stale = true; };
  const sized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      if (target.chart.width !== contentRect.width) { target.chart.width = contentRect.width; refresh(target.chart); }
    }
  });
  for (const element of document.querySelectorAll("[data-section]")) {
    const section = DATA[element.dataset.section];
    const state = { hidden: new Set() };
    const charts = [...element.querySelectorAll(".chart")].map((host) => {
      const chosen = (name, otherwise) => {
        const input = host.closest(".card").querySelector(`input[data-control="${name}"]:checked`);
        return input ? input.value : otherwise;
      };
      const across = () => {
        const input = element.querySelector('input[data-control="across"]:checked');
        return host.dataset.across || (input ? input.value : "epochs");
      };
      const chart = {
        host, section, state, across, stale: true, visible: false, summary: host.getAttribute("aria-label"),
        how: () => chosen("scale", host.dataset.how || "zoomed"), quantity: () => chosen("quantity", host.dataset.quantity),
        plot: html(host, "div", "plot"), tip: html(host, "div", "tip"),
      };
      chart.tip.setAttribute("aria-live", "polite");
      chart.tip.hidden = true;
      host.chart = chart;
      listen(chart);
      seen.observe(host);
      sized.observe(host);
      return chart;
    });
    element.addEventListener("change", (event) => {
      const card = event.target.closest(".card");
      for (const chart of charts) if (!card || card.contains(chart.host)) refresh(chart);
    });
    for (const chip of element.querySelectorAll("button[data-contender]")) {
      chip.addEventListener("click", () => {
        const name = chip.dataset.contender, show = state.hidden.has(name);
        if (show) state.hidden.delete(name); else state.hidden.add(name);
        chip.setAttribute("aria-pressed", String(show));
        for (const bar of element.querySelectorAll(".bar-row")) if (bar.dataset.contender === name) bar.hidden = !show;
        charts.forEach(refresh);
      });
    }
  }

  // Theme and copying --------------------------------------------------------------------------------------------------
  const theme = document.getElementById("theme");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `Use the ${dark() ? "light" : "dark"} theme`); };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch {
        getSelection().selectAllChildren(code); // where the clipboard is closed to pages, the text is at least chosen
        button.textContent = "Selected";
      }
    });
  }
})();

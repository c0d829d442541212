"""The paper's own figures, to be put beside ours.

Cooper et al., "Coordinating Distributed Example Orders for Provably Accelerated Training", NeurIPS 2023,
arXiv 2302.00845. Read off the published plots, with about one pixel of error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cdgrab_experiments.config import RunConfig

CITATION = (
    "A. F. Cooper, W. Guo, K. Pham, T. Yuan, C. F. Ruan, Y. Lu and C. De Sa: Coordinating Distributed Example Orders "
    "for Provably Accelerated Training. NeurIPS 2023, arXiv 2302.00845. Figures read off the published plots."
)
NAMES = {
    "cd-grab": "CD-GraB",
    "rr": "D-RR",
    "id-grab": "ID-GraB (MeanBalance)",
    "pair": "ID-GraB (PairBalance)",
}


@dataclass(frozen=True)
class Point:
    """Loss and metric by contender, after some epochs."""

    epoch: int
    loss: dict[str, float]
    metric: dict[str, float]


@dataclass(frozen=True)
class Published:
    """What the paper has on a task.

    Attributes:
        setup: In words.
        config: The same as fields of `RunConfig`, as far as they have one, to name what differs.
        loss: Final training loss by contender, with `metric` alike.
        metric_key: Which of our metrics is theirs; empty for the one that counts.
        curve: Some points of their curves on the way.
        epochs_to_target: Until CD-GraB stays at or below D-RR's final loss, out of `config["epochs"]`.
        pace: Seconds per epoch over D-RR's, with the authors' code, in words.
        note: What to know about these figures.
    """

    setup: str
    config: dict[str, object] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    metric_name: str = ""
    metric: dict[str, float] = field(default_factory=dict)
    metric_key: str = ""
    curve: tuple[Point, ...] = ()
    epochs_to_target: tuple[float, float] | None = None
    pace: str = ""
    note: str = ""

    @property
    def gap(self) -> float:
        """How far CD-GraB's final loss is below D-RR's; 0 if that is not known."""
        return self.loss["rr"] - self.loss["cd-grab"] if {"rr", "cd-grab"} <= self.loss.keys() else 0.0

    @property
    def epochs_ratio(self) -> str:
        """Epochs to the target over all epochs, as the paper counts them."""
        if self.epochs_to_target is None:
            return ""
        total = float(str(self.config["epochs"]))
        low, high = (f"{epochs / total:.2f}" for epochs in self.epochs_to_target)
        return low if low == high else f"{low} to {high}"


PUBLISHED = {
    "hmda": Published(
        setup="HMDA New York 2017, 195,285 / 48,822 rows; logistic regression; 4 workers, batch 16, a unit is an "
        "example; SGD 5e-3, momentum 0.9; 50 epochs, 5 seeds",
        config={"workers": 4, "batch_size": 16, "lr": 5e-3, "momentum": 0.9, "epochs": 50},
        loss={"cd-grab": 0.33546, "rr": 0.33725},
        metric_name="accuracy, %",
        metric={"cd-grab": 82.37, "rr": 82.28},
        epochs_to_target=(7.5, 7.5),
        pace="1.9 to 2.9",
    ),
    "wikitext2": Published(
        setup="WikiText-2; LSTM, 2 layers of 32, tied embedding; 4 workers, batch 16, a unit is 4 columns of 35 "
        "tokens; SGD 5.0, momentum 0.9, times 0.1 every 10 epochs, gradients clipped to 0.25, hidden state carried in "
        "visiting order; 50 epochs, 5 seeds",
        # Batches are counted in units: 4 of them are 16 columns.
        config={"variant": "published", "workers": 4, "batch_size": 4, "lr": 5.0, "momentum": 0.9, "epochs": 50},
        loss={"cd-grab": 5.311, "rr": 5.361},
        metric_name="test perplexity",
        metric={"cd-grab": 223.6, "rr": 231.9},
        metric_key="test_perplexity_published",
        curve=(
            Point(1, {}, {"cd-grab": 325.0, "rr": 334.0}),  # extrapolated from the plots
            Point(3, {"rr": 5.74}, {}),
            Point(5, {"cd-grab": 5.617, "rr": 5.670}, {"cd-grab": 268.5, "rr": 285.3}),
            Point(10, {"cd-grab": 5.567, "rr": 5.625}, {"cd-grab": 271.0, "rr": 286.0}),
        ),
        epochs_to_target=(15.0, 15.0),
        pace="1.5",
        note="Only the first 20 epochs change anything: then the step is too small. Perplexities are by the authors' "
        "formula, about 1.3 % too high. As far as it is on record, their code balanced nothing here.",
    ),
    "m4": Published(
        setup="M4 Weekly, 359 series; autoregressive MLP 20-64-64-1; 4 workers, batch 16 (as plotted), a unit is an "
        "example; SGD 1e-3, momentum 0.9, times 0.25 every 10 epochs; 30 epochs, 5 seeds",
        config={"workers": 4, "batch_size": 16, "lr": 1e-3, "momentum": 0.9, "epochs": 30},
        loss={"cd-grab": 0.09053, "rr": 0.0919},
        metric_name="sMAPE",
        metric={"cd-grab": 8.51, "rr": 8.86},
        epochs_to_target=(14.8, 14.8),
        pace="2.1",
        note="The published command line says 32 workers and batch 32, the plots 4 and 16.",
    ),
    "gpt2": Published(
        setup="WikiText-103; GPT-2 with 2 layers, 2 heads, width 128, context 128; 64 simulated workers, batch 64, a "
        "unit is an example; AdamW 5e-4; 30 epochs, 3 seeds",
        config={"workers": 64, "batch_size": 64, "lr": 5e-4, "epochs": 30},
        loss={"cd-grab": 4.0977, "rr": 4.1044},
        metric_name="perplexity",
        metric={"cd-grab": 66.11, "rr": 66.52},
        epochs_to_target=(26.5, 26.5),
        note="Losses of WikiText-103 do not compare with those of another corpus; ratios do, in kind.",
    ),
    "cifar10": Published(
        setup="CIFAR-10; LeNet; 4 to 64 simulated workers, batch 64, a unit is an example; SGD 1e-3, momentum 0.9, "
        "weight decay 1e-2; 100 epochs, 3 seeds",
        config={"batch_size": 64, "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-2, "epochs": 100},
        epochs_to_target=(73.0, 76.0),
        note="Published losses are means of epochs 91 to 100.",
    ),
    "glue": Published(
        setup="BERT fine-tuning on GLUE, in the first version of the paper",
        note="Stated as better than D-RR; no figures were published.",
    ),
}
# Read off at epoch 20, after which the step is too small to change anything; 5.383 is passed between 12.6 and 12.7.
_WIKITEXT2 = PUBLISHED["wikitext2"]
WIKITEXT2_AFTER_20 = replace(
    _WIKITEXT2,
    setup=_WIKITEXT2.setup.replace("50 epochs", "20 of 50 epochs"),
    config={**_WIKITEXT2.config, "epochs": 20},
    loss={"cd-grab": 5.333, "rr": 5.383},
    metric={"cd-grab": 226.7, "rr": 235.2},
    epochs_to_target=(12.65, 12.65),
)
_CIFAR10 = ("cd-grab", "rr", "id-grab", "pair")
CIFAR10_BY_WORKERS = {
    4: dict(zip(_CIFAR10, (0.652, 0.701, 0.669, 0.672), strict=True)),
    16: dict(zip(_CIFAR10, (0.663, 0.702, 0.680, 0.676), strict=True)),
    64: dict(zip(_CIFAR10, (0.661, 0.701, 0.694, 0.697), strict=True)),
}
# With 64 workers; the gain grows with the step size.
CIFAR10_BY_LR = {5e-4: (0.744, 0.775), 5e-3: (0.759, 0.856), 1e-2: (0.899, 1.024)}


def find(setting: RunConfig) -> Published | None:
    """What the paper has on this setting, if anything."""
    if setting.task == "wikitext2" and setting.epochs == 20:
        return WIKITEXT2_AFTER_20
    found = PUBLISHED.get(setting.task)
    if found is None or setting.task != "cifar10":
        return found
    if setting.workers == 64 and setting.lr in CIFAR10_BY_LR:
        losses = dict(zip(("cd-grab", "rr"), CIFAR10_BY_LR[setting.lr], strict=True))
        return replace(found, loss=losses, config={**found.config, "lr": setting.lr}, epochs_to_target=None)
    return replace(found, loss=CIFAR10_BY_WORKERS.get(setting.workers, {}))


def differences(setting: RunConfig, published: Published) -> list[str]:
    """Where our set-up is not the paper's, one by one."""
    return [
        f"{name.replace('_', ' ')} {getattr(setting, name)} instead of {value}"
        for name, value in published.config.items()
        if getattr(setting, name) != value
    ]

"""HMDA mortgages, logistic regression: the paper's convex task.

The paper's own data (New York 2017, approved or not) are read in the authors' format, two files of tensors. Where they
are not at hand, loans of 2018 in the whole United States stand in (priced high or not), and everything says so. The
stand-in is read from one file of arrays, or from the tables it was made from, which are public.
"""

from __future__ import annotations

import csv
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import logistic_regression

# The tails of the stand-in are heavy: an income of 305 deviations would decide every step it is a part of.
CLIP = 5.0
FEATURES = (
    "term_360",
    "conforming",
    "debt_to_income_ratio_missing",
    "loan_amount_std",
    "loan_to_value_ratio_std",
    "no_intro_rate_period_std",
    "intro_rate_period_std",
    "property_value_std",
    "income_std",
    "debt_to_income_ratio_std",
)
# The training table was published standardised, the test table in dollars. These are the means and deviations of the
# former, found from rows of the latter that were published both ways.
SCALES = {
    "loan_amount": (291981.0035, 227415.5113),
    "loan_to_value_ratio": (0.86337477, 0.24727655),
    "no_intro_rate_period": (0.94363782, 0.23061980),
    "intro_rate_period": (5.35342859, 24.86448459),
    "property_value": (358807.7681, 324309.1463),
    "income": (152.3337886, 2886.1658324),
    "debt_to_income_ratio": (37.65084368, 10.93979553),
}
# Ratios are published as bands, except near the limits of what is lent; a missing one counts as 25.
BANDS = {"<20%": 10.0, "20%-<30%": 25.0, "30%-<36%": 33.0, "50%-60%": 55.0, ">60%": 80.0, "": 25.0}

_Split = tuple[Tensor, Tensor]


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Dim 19 for New York 2017, 11 for the stand-in."""
    found = data.find_first(TASK.needs, folder)
    if found.set.name == "hmda-ny-2017":
        train, test = _new_york(found)
        name = "HMDA New York 2017, as prepared by the authors"
    else:
        train, test = _stand_in(found) if found.set.name == "hmda-2018" else _tables(found)
        name = "HMDA 2018 (United States, high-priced loans), a stand-in for HMDA New York 2017"
    line = f"{name}: {len(train[0]):,} / {len(test[0]):,} rows, {train[0].shape[1]} features"
    return logistic_regression(train, test, l2=0.0, seed=seed, data=line)


def _new_york(found: data.Found) -> tuple[_Split, _Split]:
    """Two files with two tensors each, for training and for testing."""
    parts = []
    for name in ("features-processed-NY-2017.pt", "targets-processed-NY-2017.pt"):
        try:
            # weights_only: a file of tensors from anywhere must not be able to run code.
            train, test = torch.load(io.BytesIO(found.read(name)), map_location="cpu", weights_only=True)
            parts.append((train.float(), test.float()))
        except (RuntimeError, pickle.UnpicklingError, ValueError, TypeError, AttributeError, EOFError) as error:
            raise found.damaged(name, f"does not hold two tensors ({str(error).splitlines()[0]})") from error
    (train_x, test_x), (train_y, test_y) = parts
    train, test = (train_x, train_y.flatten()), (test_x, test_y.flatten())
    _check(found, "features-processed-NY-2017.pt", train, test)
    return train, test


def _stand_in(found: data.Found) -> tuple[_Split, _Split]:
    name = "hmda2018.npz"
    try:
        with np.load(io.BytesIO(found.read(name))) as arrays:
            train_x, train_y, test_x, test_y = (
                torch.tensor(arrays[key], dtype=torch.float32) for key in ("X_train", "y_train", "X_test", "y_test")
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise found.damaged(name, f"does not hold the arrays that are expected ({error})") from error
    train, test = (train_x.clamp(-CLIP, CLIP), train_y), (test_x.clamp(-CLIP, CLIP), test_y)
    _check(found, name, train, test)
    return train, test


def _tables(found: data.Found) -> tuple[_Split, _Split]:
    splits = []
    for name, features in (
        ("hmda_train_preprocessed.csv", lambda row: [float(row[feature]) for feature in FEATURES]),
        ("hmda_test.csv", _on_the_training_scale),
    ):
        x, y = [], []
        for number, row in enumerate(csv.DictReader(io.StringIO(found.text(name))), start=2):
            try:
                x.append(features(row))
                y.append(float(row["high_priced"]))
            except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
                raise found.damaged(name, f"has no loan in line {number} ({error!r})") from error
        if not x:
            raise found.damaged(name, "has no loans in it")
        splits.append((torch.tensor(x).clamp(-CLIP, CLIP), torch.tensor(y)))
    train, test = splits
    _check(found, "hmda_test.csv", train, test)
    return train, test


def _on_the_training_scale(row: dict[str, str]) -> list[float]:
    """A row of the test table, as the training table has it."""
    band = row["debt_to_income_ratio"]
    values = {key: float(row[key]) for key in SCALES if key != "debt_to_income_ratio"}
    values["loan_to_value_ratio"] = values["loan_amount"] / values["property_value"]
    values["debt_to_income_ratio"] = BANDS[band] if band in BANDS else float(band)
    scaled = [(values[key] - mean) / deviation for key, (mean, deviation) in SCALES.items()]
    return [float(row["term_360"]), float(row["conforming"]), float(band == ""), *scaled]


def _check(found: data.Found, name: str, train: _Split, test: _Split) -> None:
    shapes = [tuple(part.shape) for part in (*train, *test)]
    fits = all(x.ndim == 2 and len(x) == len(y) and x.isfinite().all() for x, y in (train, test))
    if not fits or train[0].shape[1] != test[0].shape[1] or not {0.0, 1.0} >= set(train[1].unique().tolist()):
        raise found.damaged(name, f"holds rows of the shapes {shapes}, or values that are no numbers or no labels 0/1")


TASK = Task(
    name="hmda",
    title="HMDA, logistic regression",
    settings=Settings(workers=4, batch_size=16, epochs=50, lr=5e-3, momentum=0.9),
    load=load,
    needs=("hmda-ny-2017", "hmda-2018", "hmda-2018-csv"),
)

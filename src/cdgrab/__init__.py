"""Gradient-balanced data ordering for PyTorch: GraB and CD-GraB as a drop-in sampler."""

from cdgrab.balancing.rules import RULES, Greedy, Halving, Rule, RuleMaker, Walk
from cdgrab.data import Indexed
from cdgrab.functional import balance_rounds, balance_vectors
from cdgrab.loaders import ordered
from cdgrab.ordering import Ordering
from cdgrab.orders import ORDERS
from cdgrab.orders.herding import herding_bound
from cdgrab.per_example.example_grads import per_example_grads
from cdgrab.per_example.layers import register_layer
from cdgrab.per_example.layers.base import LayerAdapter
from cdgrab.sampler import OrderedSampler
from cdgrab.sources.flat import flat_grad, set_flat_grad
from cdgrab.world import World

from . import exchange, factors, sources

__version__ = "0.2.0"

__all__ = [
    "ORDERS",
    "RULES",
    "Greedy",
    "Halving",
    "Indexed",
    "LayerAdapter",
    "OrderedSampler",
    "Ordering",
    "Rule",
    "RuleMaker",
    "Walk",
    "World",
    "__version__",
    "balance_rounds",
    "balance_vectors",
    "exchange",
    "factors",
    "flat_grad",
    "herding_bound",
    "ordered",
    "per_example_grads",
    "register_layer",
    "set_flat_grad",
    "sources",
]

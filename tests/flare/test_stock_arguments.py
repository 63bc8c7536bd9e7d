# SPDX-License-Identifier: Apache-2.0
"""Components accept the arguments of the NVFlare components they replace: in a configuration, only the path changes."""

from __future__ import annotations

import inspect

import pytest
from nvflare.app_common.workflows.cross_site_model_eval import CrossSiteModelEval
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.app_opt.pt.file_model_locator import PTFileModelLocator
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

from nvflare_lazy.flare import (
    LazyAggregator,
    LazyCrossSiteEval,
    LazyFedAvg,
    LazyModelLocator,
    LazyModelPersistor,
    LazyScaffold,
)


def arguments(component: type) -> set[str]:
    """Keyword arguments of the constructor, and of its parents if it passes unknown ones on."""
    named: set[str] = set()
    for part in component.__mro__:
        if "__init__" not in vars(part):
            continue
        parameters = inspect.signature(part.__init__).parameters.values()
        named |= {parameter.name for parameter in parameters if parameter.kind not in (2, 4)} - {"self"}
        if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return named


@pytest.mark.parametrize(
    ("ours", "stock", "without"),
    [
        (LazyFedAvg, FedAvg, set()),
        (LazyScaffold, Scaffold, set()),
        (LazyCrossSiteEval, CrossSiteModelEval, set()),
        (LazyModelLocator, PTFileModelLocator, set()),
        # No model is loaded here, and no code of a checkpoint is run.
        (LazyModelPersistor, PTFileModelPersistor, {"load_weights_only", "load_device"}),
    ],
)
def test_a_component_takes_what_the_stock_one_takes(ours, stock, without):
    """All arguments by the same names, except for the documented exceptions."""
    assert arguments(stock) - arguments(ours) == without


@pytest.mark.parametrize("setting", [{"exclude_vars": "bn"}, {"aggregation_weights": {"site-1": 2.0}}])
def test_settings_of_the_aggregator_are_not_lost(setting):
    """NVFlare's controller looks at neither once it has an aggregator: then ours says where they belong."""
    [name] = setting
    with pytest.raises(ValueError, match=f"{name} .* to the aggregator"):
        LazyFedAvg(num_clients=2, aggregator=LazyAggregator(), **setting)
    assert getattr(LazyFedAvg(num_clients=2, **setting).aggregator, name) == setting[name]
    assert isinstance(LazyFedAvg(num_clients=2, aggregator=LazyAggregator(), **{name: None}), LazyFedAvg)

# SPDX-License-Identifier: Apache-2.0
"""`FedAvgRecipe`: NVFlare's recipe of the same name with flat memory on the server, and any aggregation rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe as StockFedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.utils import extract_persistor_id, setup_custom_persistor

from nvflare_lazy.flare.lazy_aggregator import LazyAggregator
from nvflare_lazy.flare.lazy_fedavg import LazyFedAvg
from nvflare_lazy.flare.lazy_model_locator import LazyModelLocator
from nvflare_lazy.flare.lazy_model_persistor import BEST_NAME, SUFFIX
from nvflare_lazy.flare.tensor_offload import DEFAULT_MEMORY_BUDGET
from nvflare_lazy.recipes.options import PACKAGE, OffloadOptions, make_lazy
from nvflare_lazy.remote import is_url


class FedAvgRecipe(StockFedAvgRecipe):
    """FedAvg for PyTorch.

    Accepts the arguments from `FedAvgRecipe` in NVFlare, from `OffloadOptions`, and these. Two defaults differ: clients
    exchange PyTorch tensors, which training scripts get in either case, and tensors are received on disk.

    Args:
        rule: The aggregation rule; see `LazyAggregator`.
        rule_args: Arguments of the rule.
        executor: Workers that compute parts of the aggregate; see `LazyAggregator`.
        min_responses: Number of results to wait for in each round. Default: those of all clients.
        wait_time_after_min_received: Seconds to wait for further results after `min_responses`.
        task_timeout: Seconds after which a round continues with the results it has. Default: 0, no limit.

    Example:
        >>> recipe = FedAvgRecipe(
        ...     checkpoint="/models/llama",
        ...     min_clients=8,
        ...     num_rounds=5,
        ...     train_script="client.py",
        ...     rule="trimmed_mean",
        ...     scratch_dir="/data/scratch",
        ... )
    """

    def __init__(
        self,
        *,
        rule: str = "mean",
        rule_args: dict[str, Any] | None = None,
        executor: str | dict[str, Any] | None = None,
        min_responses: int | None = None,
        wait_time_after_min_received: int = 0,
        task_timeout: int = 0,
        checkpoint: str | None = None,
        checkpoint_dir: str | None = None,
        keep_rounds: int | None = None,
        save_pytorch: bool = False,
        max_shard_size: int | str | None = None,
        scratch_dir: str | None = None,
        scratch_quota: int | str | None = None,
        memory_budget: int | str = DEFAULT_MEMORY_BUDGET,
        offload_clients: bool = True,
        install_in_trainers: bool = False,
        model: Any = None,
        initial_ckpt: str | None = None,
        model_persistor: ModelPersistor | None = None,
        server_expected_format: ExchangeFormat = ExchangeFormat.PYTORCH,
        best_model_filename: str | None = None,
        **arguments: Any,
    ) -> None:
        arguments.pop("enable_tensor_disk_offload", None)
        if rule != "mean" and arguments.get("aggregator") is not None:
            raise ValueError("rule and aggregator cannot be combined; pass the rule to the aggregator instead")
        if executor is not None and arguments.get("aggregator") is not None:
            raise ValueError("executor and aggregator cannot be combined; pass the executor to the aggregator instead")
        if checkpoint and initial_ckpt:
            raise ValueError("checkpoint and initial_ckpt cannot be combined; pass one initial checkpoint")
        if is_url(initial_ckpt):
            checkpoint, initial_ckpt = initial_ckpt, None
        self.rule = rule
        self.rule_args = rule_args
        self.executor = executor
        self._min_responses = min_responses
        self._wait_time_after_min_received = wait_time_after_min_received
        self._task_timeout = task_timeout
        # NVFlare's recipe accepts the second as an alias of the first.
        best_name = best_model_filename or arguments.get("save_filename")
        wants_pytorch = best_name is not None and not best_name.endswith(SUFFIX)
        self._best_name = str(Path(best_name).with_suffix(SUFFIX)) if best_name else BEST_NAME
        self.options = OffloadOptions(
            checkpoint=checkpoint,
            checkpoint_dir=checkpoint_dir,
            keep_rounds=keep_rounds,
            save_pytorch=save_pytorch or wants_pytorch,
            max_shard_size=max_shard_size,
            scratch_dir=scratch_dir,
            scratch_quota=scratch_quota,
            memory_budget=memory_budget,
            offload_clients=offload_clients,
            install_in_trainers=install_in_trainers,
        )
        super().__init__(
            model=model,
            # NVFlare's recipe requires an initial model or checkpoint, and would look for a URL on this machine. The
            # persistor gets the one of the options.
            initial_ckpt=f"/{checkpoint}" if is_url(checkpoint) else initial_ckpt or checkpoint,
            model_persistor=model_persistor,
            server_expected_format=server_expected_format,
            best_model_filename=best_model_filename,
            **arguments,
        )
        # Without this, NVFlare copies the sources of the package into the job.
        self._job.set_app_packages([PACKAGE])
        make_lazy(
            self,
            level=3 if offload_clients else 2,
            scratch_dir=scratch_dir,
            scratch_quota=scratch_quota,
            memory_budget=memory_budget,
            install_in_trainers=install_in_trainers,
        )

    def _setup_model_and_persistor(self, job: Any) -> str:
        persistor_id: str = setup_custom_persistor(job=job, model_persistor=self.model_persistor)
        if not persistor_id:
            persistor_id = extract_persistor_id(
                self.options.add_persistor(
                    job,
                    self.model,
                    self.initial_ckpt,
                    numpy=self.server_expected_format != ExchangeFormat.PYTORCH,
                    best_name=self._best_name,
                )
            )
            locator = self._pt_model_locator or LazyModelLocator(persistor_id)
            job.comp_ids["locator_id"] = job.to_server(locator, id="locator")
        job.comp_ids["persistor_id"] = persistor_id
        return persistor_id

    def _get_model_aggregator(self) -> Any:
        stock = super()._get_model_aggregator()
        if stock:
            return stock
        return LazyAggregator(
            rule=self.rule,
            rule_args=self.rule_args,
            exclude_vars=self.exclude_vars,
            aggregation_weights=self.aggregation_weights,
            server_optimizer=self._server_optimizer(),
            executor=self.executor,
        )

    def _server_optimizer(self) -> dict[str, Any] | None:
        return None

    def _create_controller(self, persistor_id: str, model_params: Any, model_aggregator: Any) -> LazyFedAvg:
        return LazyFedAvg(
            num_clients=self.min_clients,
            num_rounds=self.num_rounds,
            persistor_id=persistor_id,
            model=model_params,
            aggregator=model_aggregator,
            stop_cond=self.stop_cond,
            patience=self.patience,
            task_name="train",
            memory_gc_rounds=self.server_memory_gc_rounds,
            min_responses=self._min_responses,
            wait_time_after_min_received=self._wait_time_after_min_received,
            task_timeout=self._task_timeout,
            **self._get_controller_kwargs(),
        )

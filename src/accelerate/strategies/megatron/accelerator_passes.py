"""How a batch goes through a model and back on an accelerator: by Megatron's schedules, into its buffers of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.runtime.gradient_clock import GradientState
from accelerate.strategies.megatron.accelerator_gradients import BufferedLoss, GradientBuffers
from accelerate.strategies.megatron.configs import MegatronConfigs
from accelerate.strategies.megatron.passes import Batch, ForwardStep, Outcome, PartLoss, joined_reports, weighs_items
from accelerate.strategies.megatron.train_steps import replica_group

Parts = list[tuple[PartLoss | None, dict[str, Any]]]


def seed_generators() -> None:
    """Seed the generators that Megatron's layers draw from, unless they are; layers need them to be built.

    Ranks that share a layer draw alike where they compute alike, so the seed is that of the first of them.
    """
    if tensor_parallel.get_cuda_rng_tracker().is_initialized():
        return
    seed = [torch.initial_seed() % 2**31]
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        dist.broadcast_object_list(seed, group=group, group_src=0)
    tensor_parallel.model_parallel_cuda_manual_seed(seed[0] + 100 * parallel_state.get_pipeline_model_parallel_rank())


# --- passes -----------------------------------------------------------------------------------------------------------


class MegatronPasses:
    """Run a model on batches with Megatron's schedules; replicas exchange gradients in each pass.

    Args:
        module: What Megatron built, on its device; a list of modules where a process has several stages of a pipeline.
        trains: An optimizer will train it.
        returns_logits: The step reports logits in training too.
    """

    def __init__(
        self, module: torch.nn.Module, configs: MegatronConfigs, *, trains: bool, returns_logits: bool = False
    ) -> None:
        seed_generators()
        inner = list(module) if isinstance(module, torch.nn.ModuleList) else [module]
        self.configs = configs
        self.returns_logits = returns_logits
        self.config = get_model_config(inner[0])  # not that of `configs`: a T5 has a copy
        self.per_token = bool(self.config.calculate_per_token_loss)
        self.device = next(inner[0].parameters()).device
        self.replicas = replica_group()
        self.stages: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        self.chunks = [self._wrapped(chunk, index, trains=trains) for index, chunk in enumerate(inner)]
        self.module = self.chunks[0] if len(self.chunks) == 1 else torch.nn.ModuleList(self.chunks)
        """What the engine holds."""
        self.gradients = GradientBuffers(self.chunks if trains else ())
        self._optimizer: Any = None
        self._clock = GradientState()
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._configure(trains=trains)

    def _wrapped(self, module: torch.nn.Module, index: int, *, trains: bool) -> Any:
        ddp = self.configs.ddp
        if self.config.fp16 or self.config.bf16:
            module = Float16Module(config=self.config, module=module)
        if not trains:
            return module
        wrapped = DistributedDataParallel(
            config=self.config, ddp_config=ddp, module=module, disable_bucketing=index > 0
        )
        wrapped.broadcast_params()  # weights that were drawn at random may differ between replicas
        return wrapped

    def _configure(self, *, trains: bool) -> None:
        """Tell the schedules what they ask the configuration for."""
        config, ddp = self.config, self.configs.ddp
        if self.stages.size() > 1:
            if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
                raise ConfigurationError(
                    f"MegatronLMPlugin(pp_degree={self.stages.size()}) hands over batches of any length, which the dispatcher "
                    "'allgather' of experts cannot. Write other_megatron_args={'moe_token_dispatcher_type': 'alltoall'}."
                )
            config.variable_seq_lengths = True
        if not trains:
            return
        if ddp.reuse_grad_buf_for_mxfp8_param_ag:
            raise ConfigurationError(
                "MegatronLMPlugin(other_megatron_args={'reuse_grad_buf_for_mxfp8_param_ag': True}) puts weights where "
                "gradients of a window are kept. Leave it out."
            )
        config.finalize_model_grads_func = finalize_model_grads
        for field, method, is_wanted in (
            ("no_sync_func", "no_sync", ddp.overlap_grad_reduce),
            ("param_sync_func", "start_param_sync", ddp.overlap_param_gather and ddp.align_param_gather),
        ):
            if is_wanted:
                found = [getattr(chunk, method) for chunk in self.chunks]
                setattr(config, field, found[0] if len(found) == 1 else found)

    def attach_optimizer(self, optimizer: Any) -> None:
        """Let losses be scaled as an optimizer of Megatron's asks."""
        self._optimizer = optimizer
        self.config.grad_scale_func = optimizer.scale_loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing: a pass is one call, and exchanges its gradients."""
        return nullcontext()

    def finish_parameters(self) -> None:
        """Wait until all weights of the last step are on this rank, where layers fetch them as they compute."""
        for chunk in self.chunks:
            if self.configs.ddp.overlap_param_gather and hasattr(chunk, "start_param_sync"):
                chunk.start_param_sync(force_sync=True)

    def run(self, step: ForwardStep, batches: Sequence[Batch], *, trains: bool) -> Outcome:
        """Return the loss of a batch, averaged over replicas and the same on all stages, and what the step reports.

        Args:
            batches: The parts of the batch.
            trains: Gradients follow.
        """
        if len(self.chunks) > 1 and len(batches) < self.stages.size():
            raise UsageError(
                f"A batch came in {len(batches)} part(s), and {self.stages.size()} processes with several stages each need one "
                "a process. Write a larger MegatronLMPlugin(num_micro_batches=...), and drop_last=True for the loader."
            )
        if trains:
            self.gradients.begin_pass()
            if self._optimizer is not None:
                self._optimizer.zero_grad()  # of its own copies: some are views of the buffers
        parts: Parts = []
        rows = next((value.shape[0] for value in batches[0].values() if isinstance(value, torch.Tensor)), 1)
        get_forward_backward_func()(
            forward_step_func=self._recording(step, parts, trains=trains),
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=self.configs.model.sequence_length,
            micro_batch_size=rows,
            decoder_seq_length=self.configs.model.decoder_sequence_length,
            forward_only=not trains,
        )
        outcome = self._outcome(parts)
        if self.stages.size() > 1:
            outcome = self._of_last_stage(outcome, trains=trains)
        if trains:
            passed = self.gradients.end_pass()
            outcome.loss = BufferedLoss.apply(self._anchor, outcome.loss, self.gradients, passed)  # type: ignore[no-untyped-call]
        return outcome

    # --- losses ------------------------------------------------------------------------------------------------------

    def _recording(self, step: ForwardStep, parts: Parts, *, trains: bool) -> Callable[..., Any]:
        """Return a step that notes its losses, which the schedule changes in place, and gives it the form it averages."""

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
            output, loss_of = step(batches, model)

            def noted(output: Any) -> tuple[Any, ...]:
                value, *count, report = loss_of(output)
                if value is None:
                    if trains:
                        raise UsageError(
                            "A batch without labels was given in training, but Megatron computes gradients in the same call. "
                            "Add 'labels', or call model.eval() first."
                        )
                    parts.append((None, dict(report)))
                    return torch.zeros((), device=self.device), report
                loss = self._averaged(PartLoss(value, *count))
                parts.append((PartLoss(loss.value.detach().clone(), loss.count), dict(report)))
                if loss.count is not None:
                    return loss.value, loss.count.round().to(torch.int), report
                # A schedule multiplies it by the number of ranks that share a sequence.
                return loss.value / parallel_state.get_context_parallel_world_size(), report

            return output, noted

        return forward_step

    def _averaged(self, loss: PartLoss) -> PartLoss:
        """Return a sum, where every item has one weight; else the mean, whose own mean over ranks is that of the batch."""
        if loss.count is not None and self.per_token and weighs_items(self._clock):
            return loss
        mean, group = loss.mean, parallel_state.get_context_parallel_group()
        if loss.count is not None and group.size() > 1:
            total = loss.count.detach().clone()
            dist.all_reduce(total, group=group)
            mean = loss.value * (group.size() / total.clamp(min=1))
        # Gradients are divided by the items of all ranks then: a mean is one.
        return PartLoss(mean, torch.ones((), device=self.device) if self.per_token else None)

    def _outcome(self, parts: Parts) -> Outcome:
        """Return what came of all parts: on the last stage; nothing elsewhere."""
        if not parts:
            return Outcome(None)
        losses = [loss for loss, _ in parts if loss is not None]
        return Outcome(self._shown(losses) if losses else None, joined_reports([report for _, report in parts]))

    def _shown(self, losses: Sequence[PartLoss]) -> torch.Tensor:
        """Return the loss of all replicas: each item that counts once, or each part of each replica."""
        values = torch.stack([loss.value.float() for loss in losses])
        counts = [loss.count.float() for loss in losses if loss.count is not None]
        own = [values.sum(), torch.stack(counts).sum()] if counts else [values.mean(), torch.ones_like(values[0])]
        pair = torch.stack(own)
        dist.all_reduce(pair, group=self.replicas)
        total, count = pair.unbind()
        return total / count.clamp(min=1)

    def _of_last_stage(self, own: Outcome, *, trains: bool) -> Outcome:
        """Return the outcome of the last stage; in evaluation with the rows of what it reports."""
        last = self.stages.size() - 1
        loss = torch.zeros((), device=self.device) if own.loss is None else own.loss
        if trains and not self.returns_logits:
            dist.broadcast(loss, group=self.stages, group_src=last)
            return Outcome(loss, own.report)
        rows = {name: value for name, value in own.report.items() if isinstance(value, torch.Tensor) and value.dim()}
        facts = [(own.loss is not None, {name: (value.shape, value.dtype) for name, value in rows.items()})]
        dist.broadcast_object_list(facts, group=self.stages, group_src=last)
        has_loss, shapes = facts[0]
        report = dict(own.report)
        for name, (shape, dtype) in shapes.items():
            value = rows[name].contiguous() if name in rows else torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(value, group=self.stages, group_src=last)
            report[name] = value
        if has_loss:
            dist.broadcast(loss, group=self.stages, group_src=last)
        return Outcome(loss if has_loss else None, report)

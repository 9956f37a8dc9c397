"""A Transformers model becomes one of Megatron's with the same weights, and goes back into the format of its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from accelerate._base.errors import ConfigurationError
from accelerate.collectives.base import communicator
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.runtime import current
from accelerate.strategies.megatron.configs import MegatronConfigs
from accelerate.strategies.megatron.models import build, take_over
from accelerate.strategies.megatron.options import quiet_imports
from accelerate.strategies.megatron.weight_maps import WeightMap, is_known, weight_map
from accelerate.strategies.megatron.weights import CutWeights, layouts


@dataclass
class CarriedModel:
    """A model that Megatron trains in the place of the program's.

    Args:
        module: What Megatron built: this rank's part.
        shell: The program's model, whose weights are in the module by now.
        map: Which weight of the shell is which piece; None for a model that a function of the program built.
        replaced: Parameter of the shell -> the parameters that have it or parts of it; none on another stage.
    """

    module: torch.nn.Module
    shell: torch.nn.Module
    configs: MegatronConfigs
    weights: CutWeights
    map: WeightMap | None
    replaced: dict[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]] = field(default_factory=dict)

    def full_state_dict(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Return all weights under the names of the program's model; every rank calls it, those that keep none get none."""
        pieces: dict[str, torch.Tensor] = {}
        # Ranks that hold other layers or experts give theirs to those that keep them.
        collects = keep or self.configs.degrees.pipeline > 1 or self.configs.degrees.expert > 1
        for layout, tensor in self.weights:
            for name, piece in self.weights.whole(layout, tensor).items():
                if collects:
                    # A copy, because a piece that is whole on this rank is the parameter itself.
                    pieces[name] = piece.detach().to("cpu", copy=True)
        pieces = _of_all_stages(pieces)
        if not keep:
            return {}
        if self.map is None:
            return pieces
        state = {name: weight.from_pieces(pieces) for name, weight in self.map.weights.items()}
        return {name: state[self.map.aliases.get(name, name)] for name in self.map.names}

    def hand_over(self, engine: Any) -> None:
        """Let the program's model go: it keeps its class and configuration, and asks the engine for all else."""
        self.shell.to("meta")
        self.shell.__dict__["state_dict"] = lambda *args, **kwargs: self.full_state_dict(keep=keeps_weights())
        self.shell.__dict__["forward"] = engine.forward
        # Transformers writes files on rank 0 alone, which is not the main process here.
        self.shell.__dict__["should_save_on_this_rank"] = _saves_here


def _saves_here(is_main_process: bool) -> bool:
    return is_main_process and current.runtime().rank == current.main_rank()


def keeps_weights() -> bool:
    """Return whether this rank gets whole weights: the first, which writes files, and the main one."""
    return current.runtime().rank in (0, current.main_rank())


def _of_all_stages(pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the pieces of all stages of a pipeline and of all ranks that share experts."""
    for group in (parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_expert_model_parallel_group()):
        if group.size() > 1:
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, pieces, group=group)
            pieces = {name: piece for part in found for name, piece in part.items()}
    return pieces


def carry(
    model: torch.nn.Module, configs: MegatronConfigs, device: torch.device, plugin: MegatronLMPlugin
) -> CarriedModel:
    """Build Megatron's model for a Transformers model, and fill it with its weights.

    A model on the meta device has none: then Megatron draws them. One that a function of the program builds keeps its own.
    """
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    }
    provide, change = plugin.custom_model_provider_function, plugin.custom_prepare_model_function
    # What is drawn here must not change what the program draws later, such as the order of its data.
    with torch.random.fork_rng(devices=[]), quiet_imports():
        torch.manual_seed(_seed_of_all())
        if provide is not None:
            module = take_over(provide(**stage), configs, device)
        else:
            module = build(configs, device, **stage)
        module = module if change is None else change(module)
    per_rank = (configs.transformer.num_moe_experts or 0) // configs.degrees.expert
    first_expert = per_rank * parallel_state.get_expert_model_parallel_rank()
    found = layouts(module, configs.transformer, configs.model.vocab_size, first_expert)
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    cut = CutWeights(module, found, *groups)
    if provide is not None:
        return CarriedModel(module, model, configs, cut, None)
    given = plugin.megatron_lm_default_args.get("weight_map")
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    if not has_weights and given is None and not is_known(model):
        return CarriedModel(module, model, configs, cut, None)
    known = weight_map(model, given)
    carried = CarriedModel(module, model, configs, cut, known)
    if has_weights:
        if device.type == "cpu":
            module.to(next(model.parameters()).dtype)
        state: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
        for name in known.weights:
            # As replicas do everywhere: all ranks begin with the weights of the first.
            communicator().broadcast(state[name].data)
        cut.load_whole(partial(known.read, state))
    _follow_parameters(carried)
    return carried


def _seed_of_all() -> int:
    """Return the seed of the first rank, so that all draw the parts of the same weights."""
    seed = [torch.initial_seed()]
    communicator().broadcast_objects(seed)
    return int(seed[0])


def _follow_parameters(carried: CarriedModel) -> None:
    """Note in which parameter each of the program's lies, and train what the program trains."""
    assert carried.map is not None
    homes = {
        piece: tensor
        for layout, tensor in carried.weights
        if isinstance(tensor, torch.nn.Parameter)
        for piece in layout.piece_names
    }
    named = dict(carried.shell.named_parameters())
    trains: dict[torch.nn.Parameter, tuple[str, bool]] = {}
    for old in named.values():
        carried.replaced[old] = ()
    for piece, new in homes.items():
        weight = carried.map.pieces.get(piece)
        if weight is None:
            new.requires_grad_(False)  # a bias that the program's model has not
            continue
        parameter = named.get(weight.theirs)
        if parameter is None:
            continue  # a buffer
        carried.replaced[parameter] = (*carried.replaced[parameter], new)
        if trains.setdefault(new, (weight.theirs, parameter.requires_grad))[1] != parameter.requires_grad:
            raise ConfigurationError(
                f"{weight.theirs!r} has requires_grad={parameter.requires_grad} and {trains[new][0]!r} has not, but Megatron "
                "fuses both into one parameter. Freeze both, or none."
            )
        new.requires_grad_(parameter.requires_grad)

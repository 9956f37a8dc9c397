from accelerate.checkpointing.sharded import merge_fsdp_weights as merge_fsdp_weights
from accelerate.config.plugins.fsdp import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.config.plugins.fsdp import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate.strategies.fsdp.public import ensure_weights_retied as ensure_weights_retied
from accelerate.strategies.fsdp.public import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate.strategies.fsdp.public import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate.strategies.fsdp.public import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate.strategies.fsdp.public import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from accelerate.strategies.fsdp.public import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate.strategies.fsdp.public import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from accelerate.strategies.fsdp.public import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate.strategies.fsdp.public import get_parameters_from_modules as get_parameters_from_modules
from accelerate.strategies.fsdp.public import load_fsdp_model as load_fsdp_model
from accelerate.strategies.fsdp.public import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate.strategies.fsdp.public import save_fsdp_model as save_fsdp_model
from accelerate.strategies.fsdp.public import save_fsdp_optimizer as save_fsdp_optimizer

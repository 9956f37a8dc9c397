from accelerate.commands.config.default import write_basic_config as write_basic_config
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.utils.ao import *
from accelerate.utils.bnb import *
from accelerate.utils.constants import *
from accelerate.utils.dataclasses import *
from accelerate.utils.deepspeed import *
from accelerate.utils.environment import *
from accelerate.utils.fsdp_utils import *
from accelerate.utils.imports import *
from accelerate.utils.launch import *
from accelerate.utils.memory import *
from accelerate.utils.modeling import *
from accelerate.utils.offload import *
from accelerate.utils.operations import *
from accelerate.utils.other import *
from accelerate.utils.random import *
from accelerate.utils.torch_xla import *
from accelerate.utils.tqdm import tqdm as tqdm
from accelerate.utils.transformer_engine import *
from accelerate.utils.versions import *

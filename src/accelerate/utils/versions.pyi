from accelerate._base.imports import compare_versions as compare_versions
from accelerate._base.imports import is_torch_version as is_torch_version
from accelerate._base.imports import torch_version as torch_version

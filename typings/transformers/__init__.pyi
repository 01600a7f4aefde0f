"""What the package uses of transformers. Without this file pyright reads 2,700 files more at every run."""

from dataclasses import dataclass
from typing import Any

from torch import nn

@dataclass
class PretrainedConfig:
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def to_dict(self) -> dict[str, Any]: ...

class PreTrainedModel(nn.Module):
    config: PretrainedConfig
    def __getattr__(self, name: str) -> Any: ...

AutoConfig: Any
AutoModelForCausalLM: Any
AutoTokenizer: Any
CONFIG_MAPPING: Any
MODEL_FOR_CAUSAL_LM_MAPPING: Any
PreTrainedTokenizerFast: Any

"""From stages back to one model: an ordinary Hugging Face directory, its loss, and a sample of its text.

A model of bytes gets its tokenizer as an ordinary one of Hugging Face.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from noloco_node.config.data_spec import BYTES, NO_TOKENIZER
from noloco_node.config.environment import hub_token
from noloco_node.config.files import home_place
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.tokenizer_files import files_to_copy
from noloco_node.document_marks import positions_of, without_marks
from noloco_node.model.cut import build_config, build_on_meta
from noloco_node.model.subspace import dense_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_byte_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` whose 256 tokens are the bytes of UTF-8 text: token id = byte value. It is a
    byte-level BPE without merges and without special tokens, so that transformers loads it with nothing of ours
    installed. Bytes that are no text decode to the replacement character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _byte_characters() -> dict[str, int]:
    """The character that the byte-level format uses for each byte -> the byte.

    Visible Latin-1 characters stand for themselves; the other 68 bytes follow from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in sorted(visible)} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


TEMPERATURE = 0.8
SHARD_BYTES = 5_000_000_000


def merge_replicas(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of replicas of the same stage: summed in fp64, given back in fp32, in the first one's order. It takes
    one after the other, so that they need not be in memory together. ValueError when there is none, or when names or
    shapes differ."""
    totals: dict[str, Tensor] = {}
    count = 0
    for state in states:
        if not count:
            totals = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in state.items()}
        if {name: value.shape for name, value in state.items()} != {k: v.shape for k, v in totals.items()}:
            raise ValueError("replicas differ in the names or shapes of their weights")
        for name, value in state.items():
            totals[name] += value.detach().cpu()
        count += 1
    if not count:
        raise ValueError("no replica to merge")
    return {name: (totals.pop(name) / count).float() for name in list(totals)}


def export_model(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    folder: Path,
    tokenizer: str,
    shard_bytes: int = SHARD_BYTES,
    revision: str | None = None,
) -> None:
    """Write config, weights, generation config and tokenizer to `folder`, for transformers alone to load.

    `state` holds every parameter of the whole model under its full Hugging Face name (ValueError otherwise). Factors of
    a subspace are multiplied out. It is saved in fp32, in files of `shard_bytes` at most, with an index if they are
    several. `tokenizer` is `bytes`, `none` for none, or what `AutoTokenizer.from_pretrained` takes, of the hub in that
    `revision`. A folder's files are copied as they are, so that the export's tokenizer is the run's by its fingerprint,
    too.
    """
    config, backend = build_config(spec), _tokenizer_to_write(tokenizer, revision)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if backend is not None:
            setattr(config, key, getattr(backend, key))
    if config.pad_token_id is not None and config.pad_token_id >= config.vocab_size:
        config.pad_token_id = None  # a tokenizer may have marks beyond the model's ids, and torch refuses this one
    model = build_on_meta(config)
    _assign(model, dense_state(spec, state))
    with _quiet():
        cast(Any, model).save_pretrained(folder, max_shard_size=shard_bytes)
        if backend is not None:
            _write_tokenizer(backend, tokenizer, folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)  # safetensors lets nobody but the owner read what it writes


def parameters_of(spec: ModelSpec) -> int:
    """Parameters of the exported model: more than are trained in a subspace, since factors are multiplied out."""
    return sum(parameter.numel() for parameter in build_on_meta(build_config(spec)).parameters())


def load_exported(folder: Path) -> PreTrainedModel:
    """The model of an exported folder, fp32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    with _quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
            folder, dtype=torch.float32
        )
    return loaded.eval()


def model_of(spec: ModelSpec, state: Mapping[str, Tensor]) -> PreTrainedModel:
    """The whole model with these weights, fp32 copies, in evaluation mode, without a folder. `state` as
    `export_model` takes it, and checked as there. The global random state is left as it was."""
    from transformers import AutoModelForCausalLM

    random_state = torch.default_generator.get_state()
    try:
        made = AutoModelForCausalLM.from_config(build_config(spec), dtype=torch.float32)  # pyright: ignore
    finally:
        torch.default_generator.set_state(random_state)
    model, state = cast("PreTrainedModel", made), dense_state(spec, state)
    _check_names(model, state)
    model.load_state_dict({name: value.detach().cpu() for name, value in state.items()}, strict=False)
    return cast("PreTrainedModel", cast(Any, model).eval())


def evaluate_model(model: PreTrainedModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean cross-entropy of (inputs, labels), both int64 [B, T], labels with marks where documents begin, in nats per
    token. ValueError without batches."""
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for inputs, labels in batches:
            positions, wanted = positions_of(labels), without_marks(labels)
            apart = {} if positions is None else {"position_ids": positions}
            logits: Tensor = model(inputs, use_cache=False, **apart).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
            total += float(loss)
            tokens += labels.numel()
    if not tokens:
        raise ValueError("no window to evaluate")
    return total / tokens


def generate_sample(folder: Path, prompt: str, tokens: int, seed: int, temperature: float = TEMPERATURE) -> str:
    """The prompt and up to `tokens` further tokens of an exported model, drawn at `temperature`; at 0 the likeliest.

    The same seed gives the same text; the global random state is left as it was. The sample ends early at the model's
    last position. ValueError for an empty prompt.
    """
    tokenizer = pretrained_tokenizer(str(folder))
    ids: Tensor = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("the prompt holds no token")
    return cast(str, tokenizer.decode(continue_ids(load_exported(folder), ids[0], tokens, seed, temperature)))


class _Teller:
    """What transformers calls a streamer: hears of tokens as they are drawn, the prompt's first, all at once."""

    def __init__(self, prompt: int, told: Callable[[int], None]) -> None:
        self._left_out, self._told = prompt, told

    def put(self, value: Tensor) -> None:
        for token in cast("list[int]", value.flatten().tolist()):  # pyright: ignore[reportUnknownMemberType]
            if self._left_out:
                self._left_out -= 1
            else:
                self._told(token)

    def end(self) -> None:
        """No more come."""


def continue_ids(
    model: PreTrainedModel,
    prompt: Tensor,
    tokens: int,
    seed: int,
    temperature: float = TEMPERATURE,
    told: Callable[[int], None] | None = None,
) -> list[int]:
    """`generate_sample` without a tokenizer: ids int64 [T] and up to `tokens` further ones, of each of which `told`
    hears as soon as it is drawn."""
    ids = prompt.reshape(1, -1)
    room = max(1, min(tokens, model.config.max_position_embeddings - ids.shape[1]))
    state = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        drawn: Tensor = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
            pad_token_id=0,
            streamer=None if told is None else _Teller(ids.shape[1], told),
        )
    finally:
        torch.default_generator.set_state(state)
    return cast("list[int]", drawn[0].tolist())  # pyright: ignore[reportUnknownMemberType]


def _assign(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    _check_names(model, state)
    weights = {name: value.detach().to("cpu", torch.float32) for name, value in state.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()


def _check_names(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    expected = {name: parameter.shape for name, parameter in torch.nn.Module.named_parameters(model)}
    wrong = sorted(expected.keys() ^ state.keys()) or [name for name in state if state[name].shape != expected[name]]
    if wrong:
        raise ValueError(f"the state does not fit the model at {', '.join(wrong[:5])}")


def _tokenizer_to_write(name: str, revision: str | None) -> Any:
    """None where the run has none."""
    if name == NO_TOKENIZER:
        return None
    return build_byte_tokenizer() if name == BYTES else pretrained_tokenizer(name, revision)


def _write_tokenizer(backend: Any, name: str, folder: Path) -> None:
    files = files_to_copy(home_place(name))
    if not files:
        backend.save_pretrained(folder)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def pretrained_tokenizer(name: str, revision: str | None = None) -> Any:
    """What transformers makes of a folder, or a name of the hub. OSError or ValueError where that is none."""
    from transformers import AutoTokenizer

    place, which = str(home_place(name)), revision or "main"
    return AutoTokenizer.from_pretrained(place, revision=which, trust_remote_code=False, token=hub_token())


@contextmanager
def _quiet() -> Generator[None]:
    """No progress bars of transformers: they would tear the display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

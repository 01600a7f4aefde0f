"""A text through the stages of a swarm in memory: what the whole model would say, whichever node dies, within a
ration."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from noloco_node.cli import evaluating as eval_commands
from noloco_node.config.node_settings import NodeSettings
from noloco_node.data.tokenizers import ByteTokenizer, NoTokenizer, Tokens
from noloco_node.directory.records import PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.generating import Wish, continue_text, drawn
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.export import model_of
from noloco_node.pipeline import live_model
from noloco_node.pipeline.admission import Rations
from noloco_node.pipeline.inference import FORWARD, SAVED_WINDOWS, ForwardHeader
from noloco_node.pipeline.live_model import LiveModel
from noloco_node.training.compute_thread import Priority, QueueTurn
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import Message, TensorSpec
from tests.inside import directory_of, served_by, thread_of
from tests.memory_directory import MemoryDirectory
from tests.support import eventually
from tests.worlds import IN_SUBSPACE, LENGTH, VOCABULARY, World, micro_spec, trainer_of, world

ASKER = PeerId("one-who-generates")
PROMPT = [7, 3, 11, 60]


class Numbers(ByteTokenizer):
    """Ids below the vocabulary of the tiny run, as letters."""

    vocab_size = VOCABULARY

    def encode(self, text: str) -> Tokens:
        """Letters from A on."""
        return super().encode(text) - ord("A")

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the encoded text."""
        return "".join(chr(ord("A") + number) for number in ids)


class Asked:
    """A swarm that answers, and an asker."""

    def __init__(self, made: World) -> None:
        self.made = made
        self.spec = made.replicas[0].context.spec
        self.said: list[str] = []

    @contextlib.asynccontextmanager
    async def model(self, name: PeerId = ASKER, patience: float = 0.0) -> AsyncIterator[LiveModel]:
        """Asked stage by stage."""
        transport = MemoryTransport(self.made.network, name)
        directory, rng = MemoryDirectory(self.made.hub), random.Random(1)
        try:
            yield LiveModel(
                self.spec, transport, directory, self.said.append, rng=rng, pause=(0.0, 0.0), patience=patience
            )
        finally:
            await transport.close()

    async def whole(self) -> Any:
        """The weights of all stages in one piece."""
        state: dict[str, Tensor] = {}
        for stage in range(self.spec.stages):
            replica = self.made.of_stage(stage)[0]
            _, fast = await replica.worker.named_weights()
            state |= {replica.full_names[name]: value for name, value in fast.items()}
        return model_of(self.spec.model, state)


@contextlib.asynccontextmanager
async def answering(
    stages: int = 3, replicas: int = 2, share: float = 0.03, subspace: dict[str, object] | None = None
) -> AsyncIterator[Asked]:
    """Replicas that accept as they do while they train."""
    settings = NodeSettings(in_flight=1, drain_seconds=1, generate_share=share)
    async with world(micro_spec(stages=stages, subspace=subspace), replicas=replicas, settings=settings) as made:
        for replica in made.replicas:
            replica.pipeline.open()
            await replica.membership.announce(PeerState.TRAINING)
        yield Asked(made)


async def told(asked: Asked, wish: Wish) -> str:
    """The text that comes of it."""
    parts: list[str] = []
    async with asked.model() as model:
        await continue_text(model.next_logits, model.longest, Numbers(), wish, parts.append)
    return "".join(parts)


@pytest.mark.parametrize(("stages", "subspace"), [(1, None), (3, None), (3, IN_SUBSPACE)])
async def test_the_stages_of_a_swarm_say_what_the_whole_model_says(
    stages: int, subspace: dict[str, object] | None
) -> None:
    """The logits are the same on random routes, and so, with the same seed, is the text that transformers draws. Nobody
    sees a record of the asker, and no node counts work."""
    async with answering(stages, subspace=subspace) as asked:
        whole = await asked.whole()
        async with asked.model() as model:
            logits = await model.next_logits(PROMPT)
        with torch.no_grad():
            expected = whole(torch.tensor([PROMPT])).logits[0, -1]
        assert torch.allclose(logits, expected, atol=1e-5)
        wish = Wish(Numbers().decode(PROMPT), tokens=8, temperature=0.9, seed=5)
        text = await told(asked, wish)
        torch.manual_seed(5)
        options = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 8, "pad_token_id": 0}
        generated = whole.generate(torch.tensor([PROMPT]), **options, eos_token_id=None)
        assert text == Numbers().decode(generated[0].tolist())
        likeliest = Wish(wish.prompt, tokens=8, temperature=0.0, seed=1)
        assert await told(asked, likeliest) == await told(asked, Wish(wish.prompt, 8, 0.0, seed=2)) != text
        records = directory_of(asked.made.replicas[0].membership)
        await records.refresh()
        shown = {record.peer_id for stage in range(stages) for record in records.view.live(stage, records.now())}
        assert ASKER not in shown
        assert all(replica.pipeline.ledger.served == 0 for replica in asked.made.replicas)


async def test_a_peer_that_dies_or_answers_nonsense_is_replaced_and_the_text_is_the_same() -> None:
    """One replica of stage 1 leaves without a word between two tokens; one of stage 2 gives too short an answer."""
    async with answering(replicas=3) as asked:
        wish = Wish("ABC", tokens=10, temperature=0.7, seed=3)
        whole = await told(asked, wish)
        dead, liar = asked.made.of_stage(1)[0], asked.made.of_stage(2)[0]

        async def short(_peer: PeerId, _message: Message) -> Message:
            return Message({}, (torch.zeros(1, VOCABULARY - 1),))

        served_by(liar.context.transport)[FORWARD.name].handle = short
        parts: list[str] = []

        def write(text: str) -> None:
            parts.append(text)
            if len(parts) == 3:
                asked.made.network.kill(dead.context.transport.peer_id)

        async with asked.model() as model:
            await continue_text(model.next_logits, model.longest, Numbers(), wish, write)
            assert model.replaced >= 2
        assert "".join(parts) == whole


@pytest.mark.parametrize("temperature", [0.01, 1.0, 1e-40])
def test_logits_as_large_as_a_stranger_likes_end_no_text(temperature: float) -> None:
    """The likeliest token is drawn."""
    logits = torch.zeros(1000)
    logits[5] = 1e38
    assert drawn(logits, temperature, torch.Generator().manual_seed(0)) == 5


def test_what_a_swarm_says_does_not_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Strangers choose the tokens; lines stay lines."""
    eval_commands._write("one\ttwo\n\x1b]52;c;cm0=\x07\r\u202e…ü")  # pyright: ignore[reportPrivateUsage]
    assert capsys.readouterr().out == "one\ttwo\n\ufffd]52;c;cm0=\ufffd\ufffd\ufffd…ü"


@pytest.mark.parametrize(("terminal", "between"), [(True, "\n"), (False, "")])
def test_what_is_said_while_a_text_comes_begins_a_line(
    terminal: bool, between: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; a text that goes to a file gets no line of its own for it."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print("Once upon", end="")
    eval_commands.say_beside("stage 1 gives nothing now")
    told = capsys.readouterr()
    assert (told.out, told.err) == (f"Once upon{between}", "stage 1 gives nothing now\n")


async def test_who_was_silent_is_not_asked_again_while_others_are_only_full() -> None:
    """Each time would cost a whole deadline; where all have been silent they are asked all the same."""
    async with answering(stages=1) as asked, asked.model(patience=1e9) as model:
        dead, full = (replica.context.transport.peer_id for replica in asked.made.replicas)
        asked.made.network.kill(dead)
        for _ in range(8):
            await model.next_logits([1])
        assert model.replaced == 1
        method, said = served_by(asked.made.replicas[1].context.transport)[FORWARD.name], 0
        admit = method.admit

        def busy(*request: Any) -> Any:
            nonlocal said
            said += 1
            if said < 6:
                raise Refused(Refusal.BUSY)
            return admit(*request)

        method.admit = busy
        await model.next_logits([1])
        assert (said, model.replaced) == (6, 1)
        model._silent[full] = math.inf
        await model.next_logits([1])


async def test_a_stage_that_answers_nothing_ends_the_text_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody is there, that is not waited for as long as a peer is there that may give some. Peers may give none: by
    setting, or while they leave."""
    async with answering(replicas=1) as asked:
        asked.made.replicas[1].pipeline.shut()
        with pytest.raises(UserError, match=r"stage 1 .* draining") as caught:
            await told(asked, Wish("A", 1, 0.0, 0))
        assert caught.value.exit_code is ExitCode.NO_STATE_SOURCE
        await asked.made.replicas[1].membership.announce(PeerState.GONE)
        with pytest.raises(UserError, match=r"stage 1 .* the directory shows none"):
            await told(asked, Wish("A", 1, 0.0, 0))
        monkeypatch.setattr(live_model, "NOBODY_SECONDS", 0.0)
        with pytest.raises(UserError, match=r"stage 1 .* the directory shows none"):
            async with asked.model(patience=1e9) as model:
                await model.next_logits([1])
    async with answering(replicas=1, share=0.0) as asked:
        with pytest.raises(UserError, match=r"stage 0 .* unknown_method"):
            async with asked.model(patience=1e9) as model:
                await model.next_logits([1])


async def test_a_run_without_a_tokenizer_goes_on_from_ids() -> None:
    """Text is refused with the remedy."""
    async with answering(replicas=1) as asked, asked.model() as model:
        parts, none = list[str](), NoTokenizer(VOCABULARY)
        spoken = await continue_text(model.next_logits, 16, none, Wish(" 7 3  11", 4, 0.0, 0), parts.append)
        assert spoken.tokens == 4
        words = "".join(parts).split(" ")
        assert words[:3] == ["7", "3", "11"]
        assert len(words) == 7
        for wrong in ("seven", str(VOCABULARY), "-1"):
            with pytest.raises(UserError, match="no tokenizer"):
                await continue_text(model.next_logits, 16, none, Wish(wrong, 4, 0.0, 0), parts.append)


async def test_a_text_ends_where_the_windows_of_the_run_do() -> None:
    """A prompt that is longer, or none, is refused before anybody is asked."""
    async with answering(replicas=1) as asked, asked.model() as model:
        wish, parts = Wish("A" * LENGTH, tokens=9, temperature=0.0, seed=0), list[str]()
        spoken = await continue_text(model.next_logits, model.longest, Numbers(), wish, parts.append)
        assert (spoken.tokens, spoken.full, len("".join(parts))) == (1, True, LENGTH + 1)
        for prompt in ("", "A" * (LENGTH + 1)):
            with pytest.raises(UserError) as caught:
                await continue_text(model.next_logits, model.longest, Numbers(), Wish(prompt, 1, 0.0, 0), parts.append)
            assert caught.value.exit_code is ExitCode.USAGE


async def test_who_asks_for_much_gets_what_was_saved_and_then_a_share_of_what_is_trained() -> None:
    """However many keys ask; none of them takes what the others may have."""
    trained = 0
    rations = Rations(0.05, SAVED_WINDOWS * 16.0, lambda: trained)
    peers = [PeerId(f"asker-{number}") for number in range(40)]

    def had(asked: Sequence[PeerId]) -> int:
        came = 0
        for peer in asked:
            with contextlib.suppress(Refused):
                while True:
                    rations.take(peer, 16)
                    came += 16
        return came

    assert had(peers[:1]) == SAVED_WINDOWS * 16 // 2
    assert had(peers[1:]) == SAVED_WINDOWS * 16 // 2
    trained = 64_000
    assert had(peers) == SAVED_WINDOWS * 16, "no more is saved up than at first"
    served = 0
    for _ in range(100):
        trained += 1000
        served += had(peers)
    assert served == pytest.approx(0.05 * 100_000, rel=0.01)
    trained = 0
    assert had(peers) == 0


async def test_a_node_holds_few_windows_of_askers_and_says_busy() -> None:
    """Whatever else it does: one a peer, two in all; places are free again when the answer is there."""
    async with answering(stages=2, replicas=1) as asked:
        server = asked.made.replicas[0].pipeline.inference
        header = ForwardHeader(run=asked.spec.run_id, stage=0)
        specs = (TensorSpec("i32", (1, 4)),)
        places = [server.admit(PeerId(f"asker-{number}"), header, specs) for number in range(2)]
        with pytest.raises(Refused) as refused:
            server.admit(ASKER, header, specs)
        assert refused.value.reason is Refusal.BUSY
        for free in places:
            assert free is not None
            free()
        async with asked.model() as model:
            first = await model.next_logits([1, 2])
        assert first.shape == (VOCABULARY,)
        assert server._held == 0


@pytest.mark.parametrize(
    ("stage", "tensors", "reason"),
    [
        (0, (torch.zeros(1, LENGTH + 1, dtype=torch.int32),), Refusal.TOO_LARGE),
        (0, (torch.zeros(2, 4, dtype=torch.int32),), Refusal.MALFORMED),
        (0, (torch.full((1, 4), VOCABULARY, dtype=torch.int32),), Refusal.MALFORMED),
        (0, (torch.full((1, 4), -1, dtype=torch.int32),), Refusal.MALFORMED),
        (0, (torch.zeros(1, 0, dtype=torch.int32),), Refusal.TOO_LARGE),
        (0, (), Refusal.MALFORMED),
        (1, (torch.zeros(1, 4, dtype=torch.int32),), Refusal.MALFORMED),
        (1, (torch.zeros(1, 4, 31),), Refusal.MALFORMED),
        (1, (torch.full((1, 4, 32), torch.inf),), Refusal.NOT_FINITE),
        (1, (torch.full((1, 4, 32), 3e38),), Refusal.DIVERGED),
    ],
)
async def test_what_is_no_window_is_refused_and_no_weight_moves(
    stage: int, tensors: tuple[Tensor, ...], reason: Refusal
) -> None:
    """Typed, and most of it before the body."""
    async with answering(stages=3, replicas=1) as asked:
        replica = asked.made.of_stage(stage)[0]
        before = trainer_of(replica.worker).master.clone()
        asker = MemoryTransport(asked.made.network, ASKER)
        header = ForwardHeader(run=asked.spec.run_id, stage=stage).model_dump(mode="json")
        with pytest.raises(Refused) as refused:
            await asker.call(
                replica.context.transport.peer_id, FORWARD.name, Message(header, tensors),
                timeout=5, progress=5, max_answer_bytes=1 << 20,
            )  # fmt: skip
        await asker.close()
        assert refused.value.reason is reason
        assert torch.equal(trainer_of(replica.worker).master, before)
        assert trainer_of(replica.worker).tokens_accumulated == 0


async def test_askers_take_turns_with_the_training_and_do_not_wait_for_its_end() -> None:
    """Beside three senders with ten microbatches each before the device, an asker comes after one of each at most."""
    async with answering(stages=2, replicas=1) as asked:
        last = asked.made.of_stage(1)[0]
        worker, begin, order = last.worker, threading.Event(), list[str]()
        trainer = trainer_of(worker)
        measure, look = trainer.evaluate_loss, trainer.last_logits

        def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def on_the_device(*given: Tensor) -> Any:
                order.append(name)
                return work(*given)

            return on_the_device

        trainer.evaluate_loss, trainer.last_logits = noted("sender", measure), noted("asker", look)
        held = asyncio.ensure_future(thread_of(worker).run(Priority.STEP, begin.wait))
        inputs, labels = torch.randn(4, LENGTH, 32), torch.zeros(4, LENGTH, dtype=torch.int32)
        waiting = [
            asyncio.ensure_future(
                worker.evaluate_loss(inputs, labels, QueueTurn((f"sender-{number % 3}",), 4 * LENGTH))
            )
            for number in range(30)
        ]
        header = ForwardHeader(run=asked.spec.run_id, stage=1)
        waiting.append(
            asyncio.ensure_future(last.pipeline.inference.handle(ASKER, header, (torch.randn(1, LENGTH, 32),)))
        )
        await eventually(lambda: worker.queued == 31, what="all wait")
        begin.set()
        await asyncio.gather(held, *waiting)
        assert order.index("asker") <= 3
        assert order.count("sender") == 30

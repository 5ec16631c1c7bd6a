"""The decoder gives every text what full passes without a cache give, whatever else is open, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm import Crowd
from ci_llm.crowd import aggregators
from ci_llm.crowd import decoder as decoder_module
from ci_llm.crowd.decoder import Decoder
from ci_llm.crowd.kv_cache import Chunk, Chunks, KVCache, SequenceGroup, cached_attention
from ci_llm.crowd.next_token import BASE_ALONE, CROWD, Decoding, Request, choose
from ci_llm.embedded import BASE_FOLDER, rows
from ci_llm.errors import ModelError
from ci_llm.lora import onednn
from tests.lora.test_adapters import K, crowd_of
from tests.lora.test_kernels import ByOneDnn
from tests.support.campaign import sampled, size
from tests.support.crowds import bits_in_company, disturbed_crowd, full_passes, save_crowd
from tests.support.peft_twins import assert_writes_as_peft
from tools.testbed.tiny import base, batch, example

#: With several threads the products of a pass are split by its rows, and round by them.
pytestmark = pytest.mark.usefixtures("one_thread")

#: Within one block, over several, and whole blocks.
PROMPTS = [example(n, seed=n).input_ids.tolist() for n in (3, 11, 16, 6, 35, 64, 17)]
GREEDY = Decoding(max_new_tokens=12)
EVERYBODY = (CROWD, *range(K), BASE_ALONE)


@pytest.fixture(scope="module")
def llama() -> Crowd:
    return moved(crowd_of(base("llama", torch.float32)))


@torch.no_grad()
def moved(crowd: Crowd) -> Crowd:
    """With smaller weights these toys only repeat the last token."""
    crowd.storage.weights.mul_(4)
    return crowd.eval()


def written(crowd: Crowd, requests: Sequence[Request], slots: int = 64, **how: Any) -> Decoder:
    """Let the decoder write all of them, with as many open at a time as it has slots."""
    decoder, waiting = Decoder(crowd, slots, **how), list(requests)
    while waiting or decoder.open:
        count = min(decoder.free, len(waiting))
        decoder.admit(waiting[:count])
        del waiting[:count]
        assert all(request in requests for request in decoder.step())
    assert decoder.free == slots
    return decoder


def mixed(prompts: Sequence[list[int]]) -> list[Request]:
    """Every prompt for everybody."""
    return [Request(p, GREEDY, who, uncertainty=True) for p in prompts for who in EVERYBODY]


def reference(crowd: Crowd, who: int | None, prompt: Sequence[int]) -> tuple[list[int], Any]:
    ids, nats = full_passes(crowd, range(K) if who is CROWD else [who], prompt, GREEDY.max_new_tokens)
    return ids, pytest.approx(nats, abs=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    sampled(
        ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi", "gpt_neox", "gpt2", "granite", "cohere"],
        ("gemma2", "gpt2", "cohere"),
    ),
)
def test_crowd_agents_and_base_write_the_texts_of_full_passes(family: str) -> None:
    crowd = moved(crowd_of(base(family, torch.float32)))
    assert crowd.base_model.route == "packed"
    requests = mixed(PROMPTS[:5:2])
    written(crowd, requests, slots=9, budget=32)
    for request in requests:
        found = request.tokens, [each.log_probability for each in request.chosen]
        assert found == reference(crowd, request.author, request.prompt)
    assert len({tuple(request.tokens) for request in requests}) > 9, "a mix-up would not be seen"


def test_the_trial_accepts_a_rounding_difference_and_refuses_a_wrong_column(
    llama: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "distance", lambda *_: 1.0)  # of some token, in bf16
    monkeypatch.setattr(llama.base_model, "decodes", None)
    assert decoder_module.decodes(llama)
    monkeypatch.setattr(llama.base_model, "decodes", None)
    update = KVCache.update

    def shifted(cache: KVCache, layer: int, start: int, *new: torch.Tensor) -> torch.Tensor:
        return update(cache, layer, start, *(each.roll(1, -2) for each in new))

    monkeypatch.setattr(KVCache, "update", shifted)
    assert not decoder_module.decodes(llama)


def test_a_crowd_that_trains_with_dropout_passes_the_trial() -> None:
    """A run that resumes at an evaluation, or at its end, draws its first texts before it takes a step."""
    crowd = moved(crowd_of(base("llama", torch.float32), dropout=0.5)).train()
    assert decoder_module.decodes(crowd)
    assert crowd.training


@pytest.mark.parametrize("is_faster", [True, False])
def test_products_use_onednn_where_it_is_faster(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: is_faster)
    crowd = moved(crowd_of(base("qwen2", torch.float32)))  # q, k and v have a bias
    requests = [Request(PROMPTS[1], GREEDY, who) for who in EVERYBODY]
    crowd.base_model.reordered(torch.float32)  # with its trials
    with ByOneDnn() as asked:
        written(crowd, requests)
    passes = 1 + 2 * (GREEDY.max_new_tokens - 1)  # of crowd and agents, who read the prompt together, and of the base
    assert asked.count == (is_faster and (passes + 1) * (2 * 7 + 1))
    for request in requests:
        found = request.tokens, [each.log_probability for each in request.chosen]
        assert found == reference(crowd, request.author, request.prompt)
    with ByOneDnn() as asked, torch.no_grad():
        crowd(batch())
    assert asked.count == 0, "what scores texts keeps its bits"


@pytest.mark.slow
def test_answers_are_those_of_plain_peft_and_of_k_full_passes(tmp_path: Path) -> None:
    crowd = disturbed_crowd()
    folder = save_crowd(crowd, tmp_path / "saved")
    assert crowd.prompter is not None
    prompts = [crowd.prompter.ids(row["question"]) for row in rows("test")[: size(4, 200)]]
    assert_writes_as_peft(crowd, BASE_FOLDER, folder, prompts, 24)


def bits(requests: Sequence[Request]) -> list[Any]:
    return [(request.tokens, request.chosen) for request in requests]


@pytest.mark.slow
@bits_in_company
def test_the_bits_of_a_text_do_not_depend_on_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded base; the products of the toys are so small that MKL takes another kernel for every size."""
    crowd = disturbed_crowd()
    assert crowd.prompter is not None
    layouts, states = set[tuple[str, int, int]](), Decoder._hidden_states

    def seen(decoder: Decoder, batch: Any) -> torch.Tensor:
        agents = len({chunk.group.author for chunk in batch.chunks} - {CROWD, BASE_ALONE})
        layouts.add((batch.kind, len(batch.ids), min(agents, 2)))
        return states(decoder, batch)

    monkeypatch.setattr(Decoder, "_hidden_states", seen)
    prompts = [crowd.prompter.ids(row["question"]) for row in rows("test")[:3]]
    wanted = mixed(prompts)
    for request in wanted:
        written(crowd, [request], slots=1)
    ways: list[Any] = [{"slots": 64}, {"slots": 16, "budget": 16}, {"slots": 7, "budget": 48}]
    for how in ways:
        found = mixed(prompts)
        order = list(found)
        random.Random(1).shuffle(order)
        decoder = written(crowd, order, **how)
        assert bits(found) == bits(wanted)
    assert decoder.reused
    together = {("crowd", crowd.num_agents, agents) for agents in (1, 2)}
    assert layouts >= together | {("crowd", 1, 0), ("agents", 1, 1), ("agents", 1, 2), ("base", 1, 0)}


@pytest.mark.slow
@bits_in_company
def test_the_last_token_of_a_prompt_has_the_same_bits_if_it_is_read_alone() -> None:
    crowd = disturbed_crowd()
    assert crowd.prompter is not None
    prompt = crowd.prompter.ids(rows("test")[0]["question"])[:33]
    wanted, found = mixed([prompt]), mixed([prompt])
    written(crowd, wanted)
    written(crowd, found, budget=32)
    assert bits(found) == bits(wanted)


@bits_in_company
def test_a_prompt_is_read_once_for_the_crowd_and_its_agents_and_for_several_samples(llama: Crowd) -> None:
    drawn = Decoding(max_new_tokens=3, do_sample=True, temperature=3)
    whos = (CROWD, *range(K))
    requests = [Request(PROMPTS[4], drawn, who, (str(who), n)) for who in whos for n in range(2)]
    decoder = written(llama, requests)
    assert decoder.read == len(PROMPTS[4])
    assert len({tuple(request.tokens) for request in requests}) == len(requests)
    alone = [Request(r.prompt, drawn, r.author, r.key) for r in requests]
    for request in alone:
        written(llama, [request])
    assert bits(alone) == bits(requests)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_texts_that_lie_together_are_attended_to_as_each_is_alone(window: int | None, softcap: float | None) -> None:
    """Of four texts of one prompt, in two rows of a pass, one has ended; a text of all rows is beside them."""
    drawn, rows, count, length = torch.Generator().manual_seed(0), 2, 3, 19
    query, key, value = (torch.randn(rows, heads, count, 8, generator=drawn) for heads in (4, 2, 2))
    lying = [torch.randn(2, many, 2, length, 8, generator=drawn) for many in (4, rows)]
    places = {0: (0, 0), 2: (1, 0), 3: (0, 1)}  # of a row of columns, row and place in the pass

    def cached(held: torch.Tensor) -> KVCache:
        found = KVCache(held.shape[1])
        found.update(0, 0, held)
        return found

    def chunk(cache: KVCache, own: Sequence[int], at: int, rows_of_pass: range) -> Chunk:
        return Chunk(SequenceGroup([], CROWD, [], cache, own), [5], length, at, rows_of_pass)

    def attended(*each: Chunk) -> torch.Tensor:
        layer: Any = SimpleNamespace(layer_idx=0)
        given: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "chunks": Chunks(each, query.device)}
        return cached_attention(layer, query, key, value, None, **given)[0]

    common, of_all = cached(lying[0]), cached(lying[1])
    each = [chunk(common, [own], at, range(row, row + 1)) for own, (row, at) in places.items()]
    found = attended(*each, chunk(of_all, range(rows), 2, range(rows)))
    for own, (row, at) in places.items():
        alone = attended(chunk(cached(lying[0][:, [own]]), [0], at, range(row, row + 1)))
        assert torch.equal(found[row, at], alone[row, at])
        smaller = common.copy([own])
        assert torch.equal(smaller.layers[0][:, 0], common.layers[0][:, own])
    alone = attended(chunk(cached(lying[1]), range(rows), 2, range(rows)))
    assert torch.equal(found[:, 2], alone[:, 2])
    assert not alone[:, :2].any()


def test_a_prompt_reuses_the_cached_prefix_of_another(llama: Crowd) -> None:
    common = PROMPTS[5]
    prompts = [[*common, 5, 6, 7], [*common, 8], [*common[:40], 9]]
    for who in EVERYBODY:
        decoder = written(llama, [Request(p, GREEDY, who) for p in prompts], slots=2)
        assert decoder.reused == 64 + 32
        assert decoder.read == sum(map(len, prompts)) - decoder.reused
    both = Decoder(llama, slots=5)
    both.admit([Request(p, GREEDY) for p in prompts[:2]])
    both.step()
    both.step()
    assert both.reused == 64, "two that come together read their beginning once"
    assert both.step() == both.open
    later = [Request([*common, 7, n], GREEDY) for n in (1, 2, 3)]
    both.admit(later)
    assert set(both.step()) >= {*later}, "a beginning that is there keeps nobody waiting for others that have it too"
    decoder, reused = Decoder(llama), []
    for number, who in ((1, CROWD), (0, 1), (0, BASE_ALONE)):
        decoder.admit([Request(prompts[number], GREEDY, who)])
        decoder.step()
        reused.append(decoder.reused)
    assert reused == [0, 64, 64], "what all agents read serves each of them, and not the base"


@bits_in_company
def test_settings_of_one_text_have_no_effect_on_another(llama: Crowd) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"aggregator": "logit"},
        {"do_sample": True, "temperature": 2, "seed": 3},
        {"do_sample": True, "top_k": 2},
        {"do_sample": True, "top_p": 0.5, "aggregator": "logit"},
        {"do_sample": True, "min_p": 0.2},
        {"max_new_tokens": 1},
    ]
    wanted, found = ([Request(PROMPTS[1], Decoding(**{"max_new_tokens": 8, **way}), top=n) for n, way in
                      enumerate(ways)] for _ in range(2))  # fmt: skip
    for request in wanted:
        written(llama, [request])
    written(llama, found)
    assert bits(found) == bits(wanted)
    assert [len(request.chosen[0].top) for request in found] == list(range(len(ways)))
    first = found[1].chosen[0]
    assert all(request.chosen[0].uncertainty is None for request in found)
    assert first.top[0] == (first.id, first.log_probability), "the most probable token comes first"


@pytest.mark.parametrize("unusable", [float("nan"), float("inf")])
def test_an_error_in_one_row_fails_that_row_only(
    unusable: float, llama: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(K, 4, 9, generator=torch.Generator().manual_seed(0))
    logits[1, 1, 3] = unusable
    logits[:, 2, 0] = unusable
    how = Decoding(do_sample=True)

    def row(n: int) -> Request:
        return Request([0], how, key=("row", n), uncertainty=n != 3, top=n)

    found = choose(logits, [row(n) for n in range(4)])
    others = choose(logits[:, [0, 3]], [row(n) for n in (0, 3)])
    assert [found[0], found[3]] == others
    [two] = choose(logits[[0, 2]][:, 1:2], [row(1)])
    assert found[1] == two, "the agent with NaN is left out of this row"
    assert isinstance(found[2], ModelError)

    monkeypatch.setattr(
        aggregators, "_OWN", {**aggregators._OWN, "logit": (lambda each: each.mean(0) * float("nan"), None)}
    )
    [spoilt] = choose(logits[:, [0]], [Request([0], Decoding(aggregator="logit"))])
    assert isinstance(spoilt, ModelError)

    def broken(log_probs: torch.Tensor) -> torch.Tensor:
        if log_probs.shape[1] != 1 or log_probs[0, 0].argmax() == log_probs[0, :, :].argmax():
            raise ZeroDivisionError("of an aggregator")
        return aggregators.mean(log_probs)

    good, bad = Request(PROMPTS[0], GREEDY), Request(PROMPTS[1], Decoding(12, aggregator="logit"))
    monkeypatch.setattr(aggregators, "_OWN", {**aggregators._OWN, "logit": (broken, None)})
    decoder = Decoder(llama)
    decoder.admit([good, bad])
    assert {*decoder.step()} == {good, bad}
    assert isinstance(bad.error, ZeroDivisionError)
    assert (bad.finish, decoder.open) == ("error", [good])
    while decoder.open:
        decoder.step()
    assert good.tokens == reference(llama, CROWD, PROMPTS[0])[0]


def test_a_text_that_is_dropped_frees_its_slot_and_the_others_continue(llama: Crowd) -> None:
    wanted = [Request(p, GREEDY) for p in PROMPTS[:4]]
    written(llama, wanted)
    end = wanted[0].tokens[2]
    requests = [Request(p, Decoding(12, frozenset({end}) if n == 0 else frozenset())) for n, p in enumerate(PROMPTS)]
    decoder = Decoder(llama, slots=4, budget=16)
    decoder.admit(requests[:4])
    decoder.release(requests[3])  # its prompt is not read
    for _ in range(4):
        decoder.step()
    decoder.release(requests[2])
    decoder.release(requests[2])
    assert decoder.free == 4 - len(decoder.open)
    while decoder.open:
        decoder.step()
    assert (requests[0].tokens, requests[0].finish) == (wanted[0].tokens[: wanted[0].tokens.index(end) + 1], "stop")
    assert (requests[1].tokens, requests[1].finish) == (wanted[1].tokens, "length")
    assert requests[2].tokens == wanted[2].tokens[: len(requests[2].tokens)]
    assert requests[3].tokens == []


def test_memory_that_runs_out_in_a_copy_changes_no_text(llama: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release, which is what frees memory, succeeds; a step in which a prompt is opened can be repeated."""

    def requests() -> list[Request]:
        return [
            Request(PROMPTS[2], Decoding(length), who) for length, who in ((3, CROWD), (12, CROWD), (6, 0), (12, 0))
        ]

    wanted, found = requests(), requests()
    written(llama, wanted)
    decoder = Decoder(llama, len(found))

    def no_memory(*_: Any) -> KVCache:
        raise torch.OutOfMemoryError("no memory for a copy")

    decoder.admit(found)
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "copy", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            decoder.step()
    assert not any(request.tokens for request in found)
    decoder.step()
    monkeypatch.setattr(KVCache, "copy", no_memory)  # while texts end
    while decoder.open:
        decoder.step()
    assert [request.tokens for request in found] == [request.tokens for request in wanted]


def test_a_step_that_fails_can_be_repeated(llama: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Request(p, GREEDY, who) for p in PROMPTS for who in EVERYBODY]
    written(llama, wanted)
    requests = [Request(p, GREEDY, who) for p in PROMPTS for who in EVERYBODY]
    decoder, calls, forward = Decoder(llama, len(requests)), 0, llama.model.model.norm.forward

    def failing(states: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise MemoryError("of the base")
        return forward(states)

    monkeypatch.setattr(llama.model.model.norm, "forward", failing)
    decoder.admit(requests)
    failed = 0
    while decoder.open:
        try:
            decoder.step()
        except MemoryError:
            failed += 1
    assert failed > 3
    assert bits(requests) == bits(wanted)

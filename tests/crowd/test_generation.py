"""The crowd generates what K full passes and one aggregation per token give; prompts, ends, sampling, saved crowds."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PegasusConfig, PegasusForCausalLM

from ci_llm import Crowd
from ci_llm.base.load import load_base
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.decoder import decodes
from ci_llm.crowd.generation import Wanted, generate_each
from ci_llm.crowd.next_token import Chosen, Decoding, Generated, Request, choose, generate_key
from ci_llm.data.encoder import Encoder
from ci_llm.data.prompts import Prompter, last_answer
from ci_llm.embedded import BASE_FOLDER, rows
from ci_llm.errors import BadInput, DamagedCheckpoint, DataError, ForeignCheckpoint, ModelError
from ci_llm.lora.settings import LoraSettings
from tests.data import test_encoder as templates
from tests.lora.test_adapters import K, crowd_of
from tests.support.bit_flips import flip
from tests.support.campaign import drawn
from tests.support.crowds import full_passes, save_crowd
from tools.testbed.tiny import FAMILIES, base, example

PROMPTS = [example(n, seed=n).input_ids.tolist() for n in (3, 11, 6)]
GREEDY = Decoding(max_new_tokens=12)
#: In fp64 the masks of two families make NaN of a pad's state (their softmax is fp32); two cannot run their experts.
ONLY_FP32 = ("gemma2", "bloom", "mixtral", "gpt_oss", "phimoe")


def reference_ids(crowd: Crowd, agents: Iterable[int], prompt: list[int]) -> list[int]:
    return full_passes(crowd, agents, prompt, GREEDY.max_new_tokens)[0]


def require_full_passes(crowd: Crowd, generated: list[Generated]) -> None:
    for prompt, found in zip(PROMPTS, generated, strict=True):
        assert found.ids == reference_ids(crowd, range(K), prompt)
        assert found.agents == [reference_ids(crowd, [k], prompt) for k in range(K)]


@pytest.fixture(scope="module")
def llama() -> Crowd:
    return crowd_of(base("llama")).eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", drawn([name for name in FAMILIES if name != "bert"], 4, seed=2))
def test_crowd_and_agents_generate_what_full_passes_give(family: str) -> None:
    """Prompts of different length, padded in one batch, beside each of them alone."""
    crowd = crowd_of(base(family, torch.float32 if family in ONLY_FP32 else torch.float64)).eval()
    with torch.no_grad():
        crowd.storage.weights.mul_(4)  # with smaller weights some of these toys only repeat the last token
    generated = crowd.generate_ids(PROMPTS, GREEDY, include_agents=True)
    require_full_passes(crowd, generated)
    texts = {tuple(text) for found in generated for text in (found.ids, *found.agents)}
    assert len(texts) == len(PROMPTS) * (K + 1), "two texts are the same, so the test would not see a mix-up"


@pytest.mark.slow
def test_a_base_that_is_not_padding_invariant_reads_one_prompt_at_a_time() -> None:
    """Pegasus counts pads as positions, so that padding would change the continuation of a short prompt."""
    shape = PegasusConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48
    )
    torch.manual_seed(0)
    crowd = crowd_of(PegasusForCausalLM(shape)).eval()
    generated = crowd.generate_ids(PROMPTS, GREEDY, include_agents=True)
    require_full_passes(crowd, generated)
    drawing = Decoding(max_new_tokens=12, do_sample=True)
    together = list(generate_each(crowd, enumerate(PROMPTS), Wanted(drawing), 3))
    alone = [generate_each(crowd, [each], Wanted(drawing), 1) for each in enumerate(PROMPTS)]
    assert together == [found for [found] in alone]


@pytest.mark.parametrize("by_decoder", [True, False])
def test_an_error_of_the_base_in_generation_is_one_message(
    llama: Crowd, by_decoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.base_model, "decodes", by_decoder)
    monkeypatch.setattr(llama.model.model.norm, "forward", lambda *_, **__: {}["cache"])
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot generate \(KeyError: 'cache'\)"):
        llama.generate_ids(PROMPTS[:1], GREEDY)


def test_generation_leaves_the_crowd_as_it_was(llama: Crowd) -> None:
    llama.base_model.route = "packed"
    llama.train()
    kept = llama.model.generation_config
    llama.generate_ids(PROMPTS, GREEDY)
    assert (llama.base_model.route, llama.training, llama.model.generation_config) == ("packed", True, kept)
    llama.eval()


def test_generation_settings_of_the_base_have_no_effect(llama: Crowd) -> None:
    wanted = llama.generate_ids(PROMPTS, GREEDY)
    own = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=5.0, eos_token_id=wanted[0].ids[0])
    llama.model.generation_config = own
    assert llama.generate_ids(PROMPTS, GREEDY) == wanted
    assert llama.model.generation_config is own


def test_a_text_stops_at_its_end_token_and_the_others_continue(llama: Crowd) -> None:
    free = llama.generate_ids(PROMPTS, GREEDY, include_agents=True)
    end = free[0].ids[3]
    found = llama.generate_ids(PROMPTS, Decoding(max_new_tokens=12, ends=frozenset({end, 5000})), include_agents=True)
    for ours, theirs in zip(found, free, strict=True):
        for text, whole in zip((ours.ids, *ours.agents), (theirs.ids, *theirs.agents), strict=True):
            assert text == (whole[: whole.index(end)] if end in whole else whole)
    assert len(found[0].ids) <= 3


def test_a_request_to_stop_ends_all_texts_at_the_next_token(llama: Crowd) -> None:
    answers = iter([False, False, True])
    generated = llama.generate_ids(PROMPTS, GREEDY, include_agents=True, stop=lambda: next(answers))
    wanted = llama.generate_ids(PROMPTS, Decoding(max_new_tokens=3), include_agents=True)
    assert generated == wanted


@pytest.mark.slow
def test_an_agent_with_nan_is_left_out() -> None:
    crowd = crowd_of(base("llama")).eval()
    wanted = [reference_ids(crowd, [0, 2], prompt) for prompt in PROMPTS]
    with torch.no_grad():
        crowd.storage.weights[1] = float("nan")
    assert [found.ids for found in crowd.generate_ids(PROMPTS, GREEDY)] == wanted
    with torch.no_grad():
        crowd.storage.weights.fill_(float("nan"))
    with pytest.raises(ModelError, match="the logits of every agent hold NaN"):
        crowd.generate_ids(PROMPTS, GREEDY)


def test_texts_end_at_the_last_position_of_the_base(llama: Crowd) -> None:
    limit = 128
    generated = llama.generate_ids([[5] * (limit - 2), [6, 7]], GREEDY)
    assert [len(found.ids) for found in generated] == [2, 12]
    with pytest.raises(DataError, match="a prompt has 128 tokens, and the base reads 128"):
        llama.generate_ids([[6, 7], [5] * limit], GREEDY)
    with pytest.raises(DataError, match="empty") as caught:
        llama.generate_ids([[6, 7], []], GREEDY)
    assert caught.value.where == "prompt 1 (counted from 0)"


def sampled(crowd: Crowd, prompts: list[list[int]] = PROMPTS, **choices: Any) -> list[list[int]]:
    decoding = Decoding(**{"max_new_tokens": 12, "do_sample": True, "seed": 1, **choices})
    return [found.ids for found in crowd.generate_ids(prompts, decoding)]


@pytest.mark.slow
def test_samples_are_reproducible_and_differ_by_seed(llama: Crowd) -> None:
    state = torch.get_rng_state()
    assert sampled(llama) == sampled(llama)
    assert torch.equal(torch.get_rng_state(), state), "a global generator was used"
    assert sampled(llama) != sampled(llama, seed=2)
    twice = sampled(llama, [PROMPTS[0], PROMPTS[0]])
    assert twice[0] != twice[1]
    assert twice[0] == sampled(llama)[0], "what stands beside a prompt changes its sample"


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_the_narrowest_sample_is_the_greedy_text(llama: Crowd, narrow: dict[str, Any]) -> None:
    assert sampled(llama, **narrow) == sampled(llama, do_sample=False)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("choices", "kept"),
    [({}, 5), ({"temperature": 2.0}, 5), ({"top_k": 2}, 2), ({"top_p": 0.75}, 3), ({"aggregator": "logit"}, 5)],
)
def test_tokens_are_drawn_from_the_aggregated_distribution(
    choices: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, decoding = 4000, Decoding(do_sample=True, **choices)
    per_agent = torch.tensor([[0.1, 0.5, 0.2, 0.15, 0.05], [0.3, 0.5, 0.1, 0.05, 0.05]]).log()
    crowd = aggregate(per_agent, decoding.aggregator) / decoding.temperature
    wanted = crowd.softmax(-1)
    wanted[wanted.argsort(descending=True)[kept:]] = 0
    wanted /= wanted.sum()
    logits = per_agent[:, None].expand(-1, draws, -1)

    def drawn() -> list[int]:
        found = choose(logits, [Request([0], decoding, key=generate_key(number)) for number in range(draws)])
        return [each.id for each in found if isinstance(each, Chosen)]

    chosen = drawn()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert drawn() == chosen
    found = torch.bincount(torch.tensor(chosen), minlength=5) / draws
    assert len(chosen) == draws
    assert found[wanted == 0].sum() == 0
    assert ((found - wanted).abs() < 4 * (wanted * (1 - wanted) / draws).sqrt() + 1e-9).all()


TEMPLATES = {
    "built in": None,
    "chatml": templates.CHATML,
    "marked": templates.CHATML_MARKED,
    "thoughts": templates.THOUGHTS_AT_THE_END,
    "instructions": templates.INSTRUCTIONS,
    "words": templates.WORDS,
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_prompt_has_the_tokens_before_the_answer_in_training(template: str | None) -> None:
    tokenizer = templates.byte_tokenizer(template)
    prompter = Prompter(tokenizer)
    trained = Encoder(tokenizer).encode(templates.LONG)
    turns = [{"role": m.role, "content": m.content} for m in templates.LONG.messages[:-1]]
    assert prompter.ids(turns) == trained.input_ids[: last_answer(trained).start].tolist()
    single = Encoder(tokenizer).encode(templates.talk("q1", "a1"))
    assert prompter.ids("q1") == single.input_ids[: last_answer(single).start].tolist()
    assert prompter.question(prompter.ids("Which of them?")).strip() == "Which of them?", "no words of the template"
    ends = {tokenizer.convert_ids_to_tokens(end) for end in prompter.ends}
    assert ends == ({"</s>", "<|im_end|>"} if "im_end" in (template or "") else {"</s>"})


def test_a_chat_keeps_its_calls_of_tools_and_what_else_its_template_shows() -> None:
    shown = (
        "{% for m in messages %}<{{ m.role }}>{% if m.thought %}({{ m.thought }}){% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.n }};{% endfor %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = templates.byte_tokenizer(shown)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"n": 3}'}}
    chat = [
        {"from": "human", "value": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call], "thought": "hm"},
        {"role": "tool", "content": [{"type": "text", "text": "5"}]},
    ]
    assert Prompter(tokenizer).text(Prompter(tokenizer).ids(chat)) == "<user>q<assistant>(hm)add:3;<tool>5<assistant>"


@pytest.fixture(scope="module")
def checkpoint(crowd: Crowd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_crowd(crowd, tmp_path_factory.mktemp("generate") / "crowd")


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


QUESTIONS = [row["question"] for row in rows("test")[:3]]


@pytest.mark.slow
def test_a_saved_crowd_answers_in_words(checkpoint: Path) -> None:
    crowd = Crowd.from_pretrained(checkpoint, device="cpu")
    answers = crowd.generate(QUESTIONS, max_new_tokens=24)
    assert len(answers) == 3
    assert answers == [crowd.generate(question, max_new_tokens=24)[0] for question in QUESTIONS]
    assert answers == crowd.generate([[{"role": "user", "content": q}] for q in QUESTIONS], max_new_tokens=24)
    assert crowd.prompter is not None
    slow = reference_ids(crowd, range(K), crowd.prompter.ids(QUESTIONS[0]))
    assert crowd.prompter.text(slow).startswith(crowd.generate(QUESTIONS[0], max_new_tokens=12)[0])
    assert crowd.generate([]) == []
    free = Counter(crowd.generate(QUESTIONS[0], max_new_tokens=16, do_sample=True)[0] for _ in range(4))
    assert len(free) > 1, "without a seed every call draws other samples"
    for batch_size in (0, -1):
        with pytest.raises(BadInput, match="batch_size must be at least 1"):
            crowd.generate(QUESTIONS, batch_size=batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"aggregator": "majority"}])
def test_the_decoder_and_transformers_write_the_same(choices: dict[str, Any]) -> None:
    """There are as many slots as prompts, or fewer, so that prompts wait for a slot that becomes free."""
    crowd = crowd_of(base("llama")).eval()
    with torch.no_grad():
        crowd.storage.weights.mul_(4)
    how = Wanted(
        Decoding(max_new_tokens=9, **choices),
        include_agents=True,
        answers_of=lambda texts: [str(list(ids)) for ids in texts],  # the crowd has no tokenizer
    )
    found = {}
    for by_decoder, at_a_time in ((False, 3), (True, 3), (True, 2), (True, 1)):
        crowd.base_model.decodes = by_decoder
        found[by_decoder, at_a_time] = list(generate_each(crowd, enumerate(PROMPTS), how, at_a_time))
    pairs = [
        (ours, theirs) for size in (3, 2, 1) for ours, theirs in zip(found[True, size], found[False, 3], strict=True)
    ]
    for ours, theirs in pairs:
        assert (ours.ids, ours.agents, ours.agents_ended) == (theirs.ids, theirs.agents, theirs.agents_ended)
        probabilities = [token.probability for token in theirs.uncertainties]
        assert [token.probability for token in ours.uncertainties] == pytest.approx(probabilities, abs=1e-6)


def test_the_decoder_serves_only_bases_that_it_reproduces(llama: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.base_model, "decodes", None)
    assert decodes(llama)
    monkeypatch.setattr(llama.base_model, "decodes", None)
    monkeypatch.setattr(llama.base_model, "route", "padded")
    assert not decodes(llama)


@pytest.mark.slow
def test_an_edited_card_does_not_matter_and_a_damaged_adapter_does(copied: Path) -> None:
    (copied / "README.md").write_text("my own words")
    Crowd.from_pretrained(copied, device="cpu")
    damaged = copied / "agent1" / "adapter_model.safetensors"
    flip(damaged, -1)
    with pytest.raises(DamagedCheckpoint, match=r"agent1/adapter_model.safetensors has another digest"):
        Crowd.from_pretrained(copied)
    damaged.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"copied is damaged: .*No such file"):
        Crowd.from_pretrained(copied)


def test_a_folder_without_a_crowd_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no checkpoint at this path"):
        Crowd.from_pretrained(tmp_path / "nowhere")
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(0, {"weights": {"w": torch.zeros(2)}})
    with pytest.raises(ForeignCheckpoint, match="holds no crowd"):
        Crowd.from_pretrained(tmp_path / "checkpoint_step_0")


@pytest.mark.slow
def test_another_base_is_refused_with_both_fingerprints(checkpoint: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    with torch.no_grad():
        other.model.norm.weight[0] += 0.01
    shutil.copytree(BASE_FOLDER, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    recorded = json.loads((checkpoint / "ci_llm_meta_config.json").read_text())["base_fingerprint"]
    with pytest.raises(ForeignCheckpoint) as caught:
        Crowd.from_pretrained(checkpoint, device="cpu", base_model=str(tmp_path / "other"))
    assert recorded in str(caught.value)
    assert load_base(str(tmp_path / "other")).fingerprint in str(caught.value)
    assert Crowd.from_pretrained(checkpoint, device="cpu", base_model=str(BASE_FOLDER)).num_agents == K


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chat", "text"])
def test_a_crowd_saved_by_a_users_own_loop_opens(tmp_path: Path, form: Any) -> None:
    """Its base was at another path and in another precision, it has no tokenizer, and prompts are plain text."""
    loaded = load_base("embedded", "bf16")
    elsewhere = str(Path("/somewhere/else", *BASE_FOLDER.parts[-3:]))
    crowd = Crowd(loaded.model, LoraSettings(num_agents=2, target_modules=("q_proj", "v_proj")), elsewhere)
    with pytest.raises(ModelError, match="no tokenizer"):
        crowd.generate("hello")
    crowd.prompter = Prompter(loaded.tokenizer, form)
    with torch.no_grad():
        crowd.storage.weights.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(7, {**crowd.adapter_files(), "ci_llm_meta_config": crowd.meta(loaded.fingerprint)})
    opened = Crowd.from_pretrained(tmp_path / "checkpoint_step_7", device="cpu")
    assert opened.model.dtype == torch.bfloat16
    assert opened.prompter is not None
    assert opened.prompter.form == form
    assert torch.equal(opened.storage.weights, crowd.storage.weights)
    assert opened.generate(QUESTIONS, max_new_tokens=8) == crowd.generate(QUESTIONS, max_new_tokens=8)

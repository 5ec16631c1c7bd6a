"""What leaves a run: the same logits in plain PEFT in another process; cards, the hub, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci_llm.base.load import load_base
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.cli.main import main
from ci_llm.config import parse_config
from ci_llm.crowd import exporting
from ci_llm.crowd.card import CardFacts, crowd_card
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.exporting import prepare
from ci_llm.crowd.merging import merge_of
from ci_llm.data.prompts import Prompter
from ci_llm.distributed.precision import DTYPES
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ModelError
from ci_llm.lora.settings import LoraSettings
from tests.data.test_encoder import byte_tokenizer
from tests.evaluation.trials import train
from tests.support.bit_flips import flip
from tests.support.campaign import sampled_cases
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer
from tools.testbed.tiny import base

K = 3
IDS = torch.arange(5, 29)[None]
#: rsLoRA, a rank that is not alpha, and lists of modules.
SETTINGS = {
    "embedded": LoraSettings(K, rank=4, alpha=6.0, target_modules=("q_proj", "down_proj")),
    "qwen2": LoraSettings(K, rank=2, alpha=5.0, use_rslora=True, target_modules=("k_proj", "o_proj")),
}

#: A program of somebody else: neither this package nor the tests are imported.
OTHER = """
import copy, functools, sys, torch
from pathlib import Path
from peft import PeftConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
plain = functools.cache(lambda name: AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32))
logits, ids = {}, torch.arange(5, 29)[None]
for folder in sorted(Path(sys.argv[1]).glob("*/*/**/*config.json")):
    if folder.name not in ("config.json", "adapter_config.json") or folder.parent.name == "base":
        continue
    folder = folder.parent
    if (folder / "config.json").is_file():
        model = plain(folder)
    else:
        base = PeftConfig.from_pretrained(folder).base_model_name_or_path
        model = PeftModel.from_pretrained(copy.deepcopy(plain(base)), folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    with torch.no_grad():
        logits[str(folder.relative_to(sys.argv[1]))] = model.eval()(input_ids=ids).logits.contiguous()
assert not [name for name in sys.modules if name.startswith(("ci_llm", "tests"))]
save_file(logits, sys.argv[2])
"""


def saved_crowd(place: Path, family: str) -> Crowd:
    """A crowd with random weights in `place/crowd`, on the embedded base or on a toy of a family in `place/base`."""
    name = "embedded"
    if family != "embedded":
        name = str(place / "base")
        base(family, torch.float32).save_pretrained(name)
        byte_tokenizer(None, pad_token="</s>").save_pretrained(name)
    loaded = load_base(name)
    crowd = Crowd(loaded.model, SETTINGS[family], loaded.name, loaded.pad_id)
    crowd.prompter = Prompter(loaded.tokenizer)
    with torch.no_grad():
        crowd.storage.weights.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    crowd.save_pretrained(place / "crowd")
    return crowd.eval()


def logits_of(crowd: Crowd) -> list[Tensor]:
    found = []
    for k in range(crowd.num_agents):
        with torch.no_grad(), crowd.base_model.active_agent(k) as model:
            found.append(model(input_ids=IDS).logits)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def crowd(place: Path) -> Crowd:
    """A crowd on the embedded base, saved in `place/embedded/crowd`."""
    return saved_crowd(place / "embedded", "embedded")


@pytest.fixture(scope="module")
def source(crowd: Crowd, place: Path) -> Path:
    return place / "embedded" / "crowd"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_another_process_computes_the_same_logits_without_this_package(tmp_path: Path) -> None:
    crowds = {family: saved_crowd(tmp_path / family, family) for family in SETTINGS}
    for family in SETTINGS:
        run, to = tmp_path / family / "crowd", tmp_path / family
        prepare(run, device="cpu").write(to / "all", None)
        one = prepare(run, device="cpu", agent=1)
        one.write(to / "one", None)
        one.write(to / "one_whole", None, "model")
        prepare(run, device="cpu", merge=merge_of("svd")).write(to / "svd", None)
        cat = prepare(run, device="cpu", merge=merge_of("cat"))
        cat.write(to / "cat", None)
        cat.write(to / "cat_whole", None, "model")
    subprocess.run(
        [sys.executable, "-c", OTHER, str(tmp_path), str(tmp_path / "logits")],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        check=True,
        timeout=DEADLINE_S,
    )
    theirs = load_file(tmp_path / "logits")
    for family, crowd in crowds.items():
        ours = logits_of(crowd)
        assert not torch.allclose(ours[0], ours[1], atol=1e-2), "the agents differ"
        for k in range(K):
            plain = theirs[f"{family}/all/agent{k}"]
            assert torch.equal(plain, theirs[f"{family}/crowd/agent{k}"]), "PEFT's bits are those of the saved crowd"
            assert_alike(plain, ours[k])
        assert torch.equal(theirs[f"{family}/one"], theirs[f"{family}/all/agent1"])
        assert_alike(theirs[f"{family}/one_whole"], ours[1])
        merged = mean_model(tmp_path / family / "base" if family != "embedded" else BASE_FOLDER, crowd)
        assert_alike(theirs[f"{family}/cat"], merged)
        assert_alike(theirs[f"{family}/cat_whole"], merged)
        assert not torch.equal(theirs[f"{family}/svd"], theirs[f"{family}/cat"])
        for name in ("crowd", "all"):
            verify_folder(tmp_path / family / name)
            again = Crowd.from_pretrained(tmp_path / family / name, device="cpu")
            assert again.settings == crowd.settings
            assert torch.equal(again.storage.weights, crowd.storage.weights)
        with pytest.raises(ModelError, match="exists already"):
            crowd.save_pretrained(tmp_path / family / "crowd")
        whole = tmp_path / family / "one_whole"
        assert json.loads((whole / "config.json").read_text())["use_cache"], "as in the base"
        assert not list(whole.glob("adapter*"))


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    """Equal up to the order of fp32 sums: to a millionth of the largest logit."""
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def mean_model(folder: Path, crowd: Crowd) -> Tensor:
    """Logits of the base with the mean of the agents' products added to its weights, in fp64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for k in range(K):
        tensors = crowd.agents[k].state_dict()
        for name in crowd.storage.layers:
            a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
            model.get_submodule(name).weight.data += crowd.agents[k].settings.scaling / K * b @ a
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
        return logits.float()


@pytest.mark.slow
def test_the_snippets_of_a_card_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("all", []), ("svd", ["--merge", "svd"]), ("whole", ["--merge", "svd", "--into-base"])):
        assert main(["export", str(source), "--to", str(tmp_path / name), *words]) == 0
        monkeypatch.chdir(tmp_path / name)
        snippets = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
        assert snippets
        for snippet in snippets:
            names: dict[str, Any] = {}
            exec(snippet, names)
            model = names.get("agent") or names.get("model")
            if model is not None:
                ids = names["tokenizer"]("3 + 4 =", return_tensors="pt").input_ids
                assert model(input_ids=ids).logits.isfinite().all()


def test_the_card_of_a_crowd_names_the_agents_that_there_are(tmp_path: Path) -> None:
    facts = CardFacts(base="embedded", ranks=[2, 2], agents=["agent1", "agent3"])
    card = crowd_card(facts)
    assert "agent0" not in card
    assert 'PeftModel.from_pretrained(base, "agent1")' in card
    here = tmp_path / "a folder"
    here.mkdir()
    [serve] = re.findall(r"```bash\n.*?\n(vllm .*?)```", card, re.DOTALL)
    script = f"vllm() {{ printf '%s\\n' \"$@\"; }}\nBASE='a base'\n{serve}"
    given = subprocess.run(["bash", "-ec", script], cwd=here, text=True, capture_output=True, check=True).stdout
    words = given.splitlines()
    assert words[:2] == ["serve", "a base"]
    assert words[words.index("--lora-modules") + 1 :] == [f"{name}={here}/{name}" for name in facts.agents]


def export(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["export", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--merge", "mean"], ["began with different random weights", "--merge svd"]),
        (["--merge", "tyes"], ["there is no merge 'tyes'", "one of: cat, svd"]),
        (["--merge", "distiled"], ["did you mean distilled?"]),
        (["--merge", "ties"], ["one of: cat, svd, mean, distilled; PEFT makes it of exported agents"]),
        (["--merge", "svd", "--rank", "0"], ["--rank: must be at least 1"]),
        (["--merge", "cat", "--rank", "4"], ["svd cuts it"]),
        (["--merge", "svd", "--rank", "13"], ["rank 12 together"]),
        (["--merge", "svd", "--weights", "1,2"], ["2 weights for 3 agents"]),
        (["--merge", "svd", "--weights", "1,b"], ["--weights", "not a list of numbers"]),
        (["--merge", "svd", "--agent", "0"], ["a merge is made of all agents"]),
        (["--agent", "3"], ["there is no agent 3", "0 to 2"]),
        (["--agent", "-1"], ["there is no agent -1"]),
        (["--rank", "3"], ["only a merge takes this", "--rank"]),
        (["--into-base"], ["one adapter can be merged into the base", "--agent K"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_call_is_one_message_and_writes_nothing(
    words: list[str], messages: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = export(capsys, source, "--to", tmp_path / "out", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("error:") == 1
    for message in messages:
        assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "link"):
        code, _, err = export(capsys, source, "--to", tmp_path / name, "--merge", "svd")
        assert (code, "exists already" in err) == (2, True)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_damaged_checkpoint_is_one_message_and_not_a_wrong_call(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(source, tmp_path / "run")
    flip(damaged / "agent1" / "adapter_model.safetensors", -1)
    code, _, err = export(capsys, damaged, "--to", tmp_path / "out")
    assert code == 2
    assert "agent1/adapter_model.safetensors has another digest" in err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_behind(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ci_llm.core import durable

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.DISK, "write", full)
    assert main(["export", str(source), "--to", str(tmp_path / "out"), "--merge", "svd"]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, with no hub behind it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


@pytest.mark.slow
def test_a_crowd_opens_from_the_hubs_cache(
    crowd: Crowd, source: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache has the layout of the hub's client: a snapshot of links to blobs."""
    repository, commit = hub / "models--someone--stories", "0" * 40
    snapshot = repository / "snapshots" / commit
    for number, file in enumerate(path for path in source.rglob("*") if path.is_file()):
        blob, link = repository / "blobs" / str(number), snapshot / file.relative_to(source)
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    opened = Crowd.from_pretrained("someone/stories", device="cpu")
    assert torch.equal(opened.storage.weights, crowd.storage.weights)
    assert main(["generate", "someone/stories", "Ann has 3 pens.", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == crowd.generate("Ann has 3 pens.", max_new_tokens=3)[0] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_disk", "trained_in"), sampled_cases([("fp32", "bf16"), ("bf16", "fp32")], [("bf16", "fp32")])
)
def test_a_merged_base_has_the_scores_that_are_printed(
    on_disk: str, trained_in: str, server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the dtype of the base on disk, was merged in fp32, and plain Transformers finds the NLL that is told."""
    small, run = tmp_path / "base", tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=DTYPES[on_disk]).save_pretrained(small)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(small)
    keys = {"model_name": str(small), "model_dtype": trained_in, "learning_rate": 0.02, "generation_eval_samples": 0}
    assert server.run(train, tmp_path / "log", folder=str(tmp_path), **keys) == [0], (tmp_path / "log").read_text()
    for words, dtype in (([], on_disk), (["--dtype", "fp32"], "fp32")):
        target = tmp_path / f"whole{len(words)}"
        assert main(["export", str(run), "--agent", "1", "--into-base", "--to", str(target), *words]) == 0
        told = capsys.readouterr().out
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        assert model.dtype == DTYPES[dtype]
        [(exact, nll)] = re.findall(r"the folder: exact match (\S+), NLL (\S+), as", told)
        # In bf16 the two round their logits in different places.
        assert float(nll) == pytest.approx(plain_nll(model, run), abs=4e-3 if dtype == "bf16" else 1e-4)
        adapter = float(re.findall(r"^agent1 +\S+ +(\S+)$", told, re.MULTILINE)[0])
        difference = re.findall(r"as Transformers opens it, (\S+) beside agent1 above", told)
        assert float(difference[0] if difference else 0) == pytest.approx(float(nll) - adapter, abs=2e-4)
        assert f"the folder{exact:>18}{nll:>10}" in (target / "README.md").read_text()
        folder, name = run / "final_checkpoint" / "agent1", "model.layers.0.mlp.down_proj"
        agent = load_file(folder / "adapter_model.safetensors")
        shape = json.loads((folder / "adapter_config.json").read_text())
        a, b = (agent[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        before = load_base(str(small), "fp32").model.get_submodule(name).weight
        wanted = before + b @ a * (shape["lora_alpha"] / shape["r"])
        assert torch.equal(model.get_submodule(name).weight, wanted.to(DTYPES[dtype]))


@torch.no_grad()
def plain_nll(model: Any, run: Path) -> float:
    """Nats per target of the rows of the run's evaluation, row by row."""
    saved = prepare(run, device="cpu").saved
    rows = exporting._rows(parse_config(str(saved.run_config), "config.yaml"), saved)
    total, count = 0.0, 0
    for row in (rows[number] for number in range(len(rows))):
        ids, learned = torch.tensor(row.input_ids), torch.tensor(row.supervised)
        log_probs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        picked = log_probs.gather(-1, ids[1:, None])[learned[1:]]
        total, count = total - float(picked.double().sum()), count + len(picked)
    return total / count

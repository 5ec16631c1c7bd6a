"""Every causal family of Transformers: do two agents on a small base learn and generate as each alone does?

    python -m benchmarks.families               all of them, about ten minutes on one core
    python -m benchmarks.families mamba bloom   these two

A base with the family's own configuration, small sizes and random weights is saved to a folder and opened from there,
as `model_name` is. Loss and gradients of each agent are compared with the family's own forward pass, with the agent
merged into its weights, row by row, without packing or padding. Then both agents continue two prompts of different
length, compared with one full pass per token. Then plain PEFT opens the agents' files. Each family runs in a process of
its own.

equal      all of that agrees, and PEFT gives the same loss (or else "; PEFT ..." says what it does)
refused    the base is refused by one message with a hint
not built  this script cannot shrink the family's configuration, or a package is missing
wrong      anything else, which is a defect

Legend: K agents, S targets.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ci_llm.base.load import load_base
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.next_token import Decoding
from ci_llm.data.batches import Batch, pack
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ModelError
from ci_llm.lora.settings import LoraSettings
from tools.testbed.tiny import example

TIME_LIMIT_S = 120
MOST_PARAMETERS = 20_000_000
K = 2
PROMPTS = [[5, 9, 11], [7, 3, 8, 12, 30, 41, 6]]
NEW_TOKENS = 4
TOLERANCE = 1e-3  # fp32, with routers and soft caps; a wrong mask or a wrong agent is off by far more

#: The new value of each size, under all names that families use for it.
SIZES = {
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim attention_hidden_size lru_width emb_dim "
    "embedding_dim input_embedding_size output_embedding_size mamba_d_ssm ple_embed_dim",
    96: "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff "
    "d_inner feed_forward_size intermediate_size_mlp shared_intermediate_size shared_expert_intermediate_size "
    "expert_ffn_hidden_size dense_intermediate_size moe_shared_expert_intermediate_size n_inner "
    "shared_experts_intermediate_size",
    16: "head_dim kv_lora_rank q_lora_rank d_head dim_head kv_channels attention_head_size swa_head_dim "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_d_head mamba_head_dim router_hidden_size index_head_dim mamba_d_state state_size ssm_state_size "
    "time_step_rank mamba_dt_rank chunk_size mamba_chunk_size adapter_rank hidden_size_per_layer_input rotary_dim "
    "laurel_rank o_lora_rank hc_lowrank global_head_dim query_pre_attn_scalar",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_attention_heads n_head "
    "n_heads num_heads attention_heads encoder_layers num_encoder_layers encoder_attention_heads "
    "num_encoder_attention_heads decoder_attention_heads num_decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts mamba_num_heads linear_num_heads linear_num_key_heads "
    "linear_num_value_heads swa_num_attention_heads num_blocks moe_k_experts index_topk",
    2: "num_key_value_heads num_kv_heads num_query_groups num_experts_per_tok num_experts_per_token moe_k moe_topk "
    "attn_layer_period expert_layer_period swa_num_key_value_heads zero_expert_num n_mamba_heads"
    "",
    1: "n_group topk_group n_groups mamba_n_groups attn_layer_offset expert_layer_offset num_expert_group "
    "topk_num_group first_k_dense_replace num_nextn_predict_layers o_groups",
    8: "sliding_window window_size attention_window_size sliding_window_size local_attention attention_chunk_size "
    "mamba_n_heads",
    128: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_source_positions "
    "max_target_positions",
    32: "index_n_heads",  # with few of them, ReLU makes many scores 0, and which of equals is chosen is left open
    576: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size",
}
SIZE = {name: size for size, names in SIZES.items() for name in names.split()}


@dataclass(frozen=True)
class FamilyResult:
    """The result of one family.

    Attributes:
        kind: "equal", "refused", "not built" or "wrong".
        detail: the route of the rows, or the error.
    """

    kind: str
    detail: str


def toy(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The family's own configuration with small sizes, also in its sub-configurations."""
    usual = kind()
    chosen: dict[str, Any] = {name: SIZE[name] for name, value in vars(usual).items() if name in SIZE and value}
    if "kv_lora_rank" in chosen:  # latent attention has no groups of heads
        chosen["num_key_value_heads"] = SIZE["num_attention_heads"]
    if hasattr(usual, "attn_layer_indices"):
        chosen["attn_layer_indices"] = [1]
    for name, part in getattr(kind, "sub_configs", {}).items():
        if issubclass(part, PreTrainedConfig) and getattr(usual, name, None) is not None:
            chosen[name] = toy(type(getattr(usual, name)))
    return kind(**chosen, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def save(family: str, folder: str) -> None:
    """Save a random base of the family, with the embedded base's tokenizer.

    Raises:
        ValueError: the configuration has more than MOST_PARAMETERS parameters in spite of its small sizes.
    """
    config = toy(CONFIG_MAPPING[family])
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"with small sizes it still has {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)


def compare(folder: str) -> str:
    """Open the base in `folder` and compare.

    Returns:
        the route of the rows, with the reason for the padded one, and how PEFT differs.

    Raises:
        ModelError: this package refuses the base.
        AssertionError: something is not equal.
    """
    base = load_base(folder)
    untouched = load_base(folder).model
    crowd = Crowd(base.model, LoraSettings(num_agents=K, rank=4, alpha=8), folder)
    reason = crowd.base_model.choose_route()
    generator = torch.Generator().manual_seed(7)
    crowd.storage.weights.copy_(torch.randn(crowd.storage.weights.shape, generator=generator) * 0.1)
    crowd.eval()  # dropout is off; gradients are still computed
    batch = pack([example(n, 4, seed) for seed, n in enumerate((9, 17, 23))], [0, 1, 2])
    crowd.storage.begin_step(0)
    output = crowd(batch)
    output.loss.backward()
    twins = [_merged(untouched, crowd, k) for k in range(K)]
    losses = [_loss(twin, batch) for twin in twins]
    for k, (twin, loss) in enumerate(zip(twins, losses, strict=True)):
        loss.backward()
        found = float(-output.log_probs[k].mean().detach())
        assert abs(found - float(loss.detach())) <= TOLERANCE, f"loss {found:.6f}, alone {float(loss.detach()):.6f}"
        for name, module in crowd.storage.layers.items():
            a, b = module.lora_A[f"agent{k}"], module.lora_B[f"agent{k}"]
            slope = twin.get_parameter(f"{name}.weight").grad
            slope = torch.zeros(b.shape[0], a.shape[1]) if slope is None else slope
            slope = (slope.T if isinstance(twin.get_submodule(name), Conv1D) else slope) * module.stacks[0].scaling
            for own, wanted in ((a, b.T @ slope), (b, slope @ a.T)):
                assert _near(own.grad, wanted.detach()), f"the gradient of {name} differs"
    found = crowd.generate_ids(PROMPTS, Decoding(max_new_tokens=NEW_TOKENS), include_agents=True)
    generated = [each.agents for each in found]
    wanted_texts = [[_continued(twin, prompt) for twin in twins] for prompt in PROMPTS]
    assert generated == wanted_texts, f"agents generate {generated}, full passes {wanted_texts}"
    in_peft = _in_peft(untouched, crowd, folder, batch, losses[0])
    return ("packed" if reason is None else f"padded: {reason}") + in_peft


@torch.no_grad()
def _merged(untouched: Any, crowd: Crowd, agent: int) -> Any:
    """A copy of the base with W + s B A in place of W."""
    twin = copy.deepcopy(untouched).eval()
    for name, module in crowd.storage.layers.items():
        product = module.stacks[0].scaling * (module.lora_B[f"agent{agent}"] @ module.lora_A[f"agent{agent}"])
        weight = twin.get_parameter(f"{name}.weight")
        weight += product.T if isinstance(twin.get_submodule(name), Conv1D) else product
        weight.requires_grad_(True)
    return twin


def _in_peft(untouched: Any, crowd: Crowd, folder: str, batch: Batch, wanted: Tensor) -> str:
    """The difference between the first agent in plain PEFT and the agent here; "" if there is none."""
    place = Path(folder, "agent0")
    place.mkdir()
    files = crowd.adapter_files()
    (place / "adapter_config.json").write_text(json.dumps(files["agent0/adapter_config"]), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in files["agent0/adapter_model"].items()}
    save_file(tensors, place / "adapter_model.safetensors")
    try:
        with torch.no_grad():
            loss = _loss(peft.PeftModel.from_pretrained(copy.deepcopy(untouched), str(place)).eval(), batch)
    except Exception as error:  # noqa: BLE001 - any error is a result of this comparison
        return f"; PEFT does not open it: {_first_line(error)}"
    return "" if abs(float(loss - wanted.detach())) <= TOLERANCE else "; PEFT gives another loss"


def _loss(twin: Any, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for row, (start, end) in enumerate(zip(batch.bounds, batch.bounds[1:], strict=False)):
        log_probs = twin(input_ids=batch.input_ids[start:end][None], use_cache=False).logits[0].log_softmax(-1)
        mine = batch.target_rows == row
        total = total - log_probs[batch.predict_from[mine] - start, batch.targets[mine]].sum()
    return total / batch.num_targets


@torch.no_grad()
def _continued(twin: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(twin(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _near(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).norm()) <= TOLERANCE * max(float(wanted.norm()), 1e-6)


def compare_family(family: str) -> FamilyResult:
    """Save, open and compare one family, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(family, folder)
        except Exception as error:  # noqa: BLE001 - a family may refuse small sizes by any error, or need a package
            return FamilyResult("not built", _first_line(error))
        try:
            return FamilyResult("equal", compare(folder))
        except ModelError as error:
            return FamilyResult("refused", error.what)
        except Exception as error:  # noqa: BLE001 - any other error is a defect to report
            return FamilyResult("wrong", _first_line(error) + _place(error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({os.path.basename(last.filename)}:{last.lineno})"


def compare_family_in_process(family: str) -> FamilyResult:
    """`compare_family` in a process of its own, for at most `TIME_LIMIT_S`."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send, args=(family, sender))
    child.start()
    sender.close()
    try:
        return (
            receiver.recv()
            if receiver.poll(TIME_LIMIT_S)
            else FamilyResult("wrong", f"not finished within {TIME_LIMIT_S} s")
        )
    except EOFError:
        return FamilyResult("wrong", "the process died")
    finally:
        child.kill()
        child.join()


def _send(family: str, pipe: Connection) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    pipe.send(compare_family(family))


def main() -> None:
    """Print one line per family, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    torch.set_num_threads(1)  # thread pools do not survive fork
    counts: Counter[str] = Counter()
    for family in parser.parse_args().families:
        result = compare_family_in_process(family)
        counts[result.kind] += 1
        print(f"{family:<24} {result.kind:<10} {result.detail}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()

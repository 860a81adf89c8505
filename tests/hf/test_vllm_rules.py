"""Exports held to what vLLM asks of a folder, on paper: vLLM itself is not run here.

Each rule has the place in vLLM's source or documentation where it was read, and a change to the
folder that breaks it, so that no rule holds by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.hf.test_folders import checkpoint_of, exported
from tests.lora.test_export import adapted
from tests.lora.test_export import exported as exported_adapter
from tests.models.reference import VARIANTS, random_decoder
from tests.sft.chats import CHATML, write_tokenizer
from torchtitan.assemble.hf import describe_export
from torchtitan.hf.beside import carried_over
from torchtitan.hf.card import VLLM_RANKS
from torchtitan.hf.write import export
from torchtitan.job import load_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
VLLM = "https://github.com/vllm-project/vllm/blob/main/vllm"
BUILT_IN = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
}
"""Of those of its models that are built here."""
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
EXPECTED_MODULES = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
"""What its models give as names of layers that take an adapter, packed ones taken apart."""


@dataclass
class Folder:
    """What is in an export."""

    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    files: dict[str, Any]
    """Of JSON the content, of others the text."""

    @classmethod
    def of(cls, path: Path) -> Folder:
        tensors: dict[str, tuple[int, ...]] = {}
        for file in path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118, it is no mapping
                    tensors[name] = tuple(content.get_slice(name).get_shape())
        kinds = {".json": json.loads, ".jinja": str}
        files = {
            file.name: kinds.get(file.suffix, lambda text: "")(file.read_bytes().decode("latin-1"))
            for file in path.iterdir()
        }
        name = "adapter_config.json" if "adapter_config.json" in files else "config.json"
        return cls(files[name], tensors, files)

    @property
    def rope(self) -> dict[str, Any]:
        return self.config.get("rope_scaling") or {"rope_type": "default"}


@dataclass
class Rule:
    says: str
    source: str
    holds: Callable[[Folder], bool]
    breaks: Callable[[Folder], object]


def id_of(tokenizer: dict[str, Any], name: str) -> int:
    return next(one["id"] for one in tokenizer["added_tokens"] if one["content"] == name)


def yarn_fits(folder: Folder) -> bool:
    """The longest text by the two ways to reckon it."""
    rope = folder.rope
    if rope["rope_type"] != "yarn":
        return True
    by_factor = rope["original_max_position_embeddings"] * rope["factor"]
    return bool(by_factor == folder.config["max_position_embeddings"])


def heads_fit(folder: Folder) -> bool:
    config, shapes = folder.config, folder.tensors
    if "kv_lora_rank" in config:  # deepseek_v2.py (DeepseekV2MLAAttention)
        q = shapes[f"model.layers.0.self_attn.q_{'b_' if config['q_lora_rank'] else ''}proj.weight"]
        kv, heads = (
            shapes["model.layers.0.self_attn.kv_b_proj.weight"],
            config["num_attention_heads"],
        )
        widths = [config[f"{part}_head_dim"] for part in ("qk_rope", "qk_nope", "v")]
        return (q[0], kv[0]) == (heads * sum(widths[:2]), heads * sum(widths[1:]))
    q, k = (shapes[f"model.layers.0.self_attn.{part}_proj.weight"][0] for part in "qk")
    width = config["head_dim"]
    return (q, k) == (
        config["num_attention_heads"] * width,
        config["num_key_value_heads"] * width,
    ) and config["num_attention_heads"] % config["num_key_value_heads"] == 0


def of_model(*names: str) -> Callable[[Folder], bool]:
    return lambda folder: all(
        any(name.startswith(start) for start in names) for name in folder.tensors
    )


def head_fits(folder: Folder) -> bool:
    return ("lm_head.weight" in folder.tensors) != folder.config["tie_word_embeddings"]


def set_to(**values: Any) -> Callable[[Folder], object]:
    return lambda folder: folder.config.update(values)


def rope_set_to(**values: Any) -> Callable[[Folder], object]:
    return lambda folder: folder.config.update(rope_scaling={**folder.rope, **values})


MODEL_RULES = [
    Rule(
        "architectures names one of its models, else it has none to build",
        f"{VLLM}/model_executor/models/registry.py",
        lambda f: len(f.config["architectures"]) == 1 and f.config["architectures"][0] in BUILT_IN,
        set_to(architectures=[]),
    ),
    Rule(
        "model_type is known to AutoConfig, which reads config.json for it",
        f"{VLLM}/transformers_utils/config.py",
        lambda f: f.config["model_type"] in MODEL_TYPES,
        set_to(model_type="titan"),
    ),
    Rule(
        "torch_dtype (dtype) is one of its names of types",
        f"{VLLM}/config/model.py (_STR_DTYPE_TO_TORCH_DTYPE)",
        lambda f: f.config["torch_dtype"] in ("half", "float16", "float", "float32", "bfloat16"),
        set_to(torch_dtype="torch.bfloat16"),
    ),
    Rule(
        "max_position_embeddings is a number: the longest text, else 2048 is assumed",
        f"{VLLM}/config/model.py (_get_and_verify_max_len)",
        lambda f: type(f.config["max_position_embeddings"]) is int,
        set_to(max_position_embeddings=None),
    ),
    Rule(
        "a stretched rotation has rope_type",
        f"{VLLM}/transformers_utils/config.py (patch_rope_parameters)",
        lambda f: f.rope["rope_type"] in ("default", "linear", "llama3", "yarn"),
        rope_set_to(rope_type="ours"),
    ),
    Rule(
        "rope_type and the legacy type do not contradict each other",
        f"{VLLM}/transformers_utils/config.py (patch_rope_parameters_dict)",
        lambda f: f.rope.get("type", f.rope["rope_type"]) == f.rope["rope_type"],
        rope_set_to(type="dynamic"),
    ),
    Rule(
        "a stretched rotation has a factor, never null",
        f"{VLLM}/config/model.py (_get_and_verify_max_len)",
        lambda f: f.rope["rope_type"] == "default" or f.rope["factor"] >= 1,
        rope_set_to(rope_type="linear", factor=0),
    ),
    Rule(
        "under YaRN the original length times the factor is the longest text",
        f"{VLLM}/config/model.py (_get_and_verify_max_len)",
        yarn_fits,
        rope_set_to(rope_type="yarn", factor=2.0, original_max_position_embeddings=7),
    ),
    Rule(
        "rope_theta stands beside it, as transformers 4 and 5 read it",
        f"{VLLM}/transformers_utils/config.py (patch_rope_parameters)",
        lambda f: f.config["rope_theta"] > 0,
        set_to(rope_theta=0),
    ),
    Rule(
        "tied embeddings have no head of their own among the weights, others have one",
        f"{VLLM}/model_executor/models/llama.py (load_weights)",
        head_fits,
        lambda f: f.config.update(tie_word_embeddings=not f.config["tie_word_embeddings"]),
    ),
    Rule(
        "heads have the width head_dim, and key heads divide query heads",
        f"{VLLM}/model_executor/models/llama.py (LlamaAttention)",
        heads_fit,
        set_to(head_dim=2, qk_nope_head_dim=2),
    ),
    Rule(
        "tensors are named as in transformers",
        f"{VLLM}/model_executor/models/llama.py (load_weights)",
        of_model("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
        lambda f: f.tensors.update({"layers.0.attention.wq.weight": (1,)}),
    ),
    Rule(
        "no other safetensors lie beside the weights, unless an index leaves them out",
        f"{VLLM}/model_executor/model_loader/weight_utils.py (filter_duplicate_safetensors_files)",
        lambda f: (
            {n for n in f.files if n.endswith(".safetensors")}
            == set(
                f.files.get("model.safetensors.index.json", {})
                .get("weight_map", {"": "model.safetensors"})
                .values()
            )
        ),
        lambda f: f.files.update({"adapter_model.safetensors": ""}),
    ),
    Rule(
        "nothing asks for code of the model's author",
        f"{VLLM}/transformers_utils/config.py (auto_map, trust_remote_code)",
        lambda f: "auto_map" not in f.config,
        set_to(auto_map={"AutoConfig": "x"}),
    ),
    Rule(
        "no quantization is claimed",
        f"{VLLM}/config/model.py (_verify_quantization)",
        lambda f: "quantization_config" not in f.config,
        set_to(quantization_config={}),
    ),
]

CHAT_RULES = [
    Rule(
        "a tokenizer lies beside the weights",
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html",
        lambda f: "tokenizer.json" in f.files and "tokenizer_config.json" in f.files,
        lambda f: f.files.pop("tokenizer.json"),
    ),
    Rule(
        "the chat template is in tokenizer_config.json or chat_template.jinja: there is no default",
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#chat-template",
        lambda f: (
            "chat_template.jinja" in f.files or "chat_template" in f.files["tokenizer_config.json"]
        ),
        lambda f: f.files.pop("chat_template.jinja"),
    ),
    Rule(
        "generation_config.json, which it takes defaults from, ends a text at a turn's end, and as "
        "the tokenizer does",
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html (generation-config)",
        lambda f: (
            f.files["generation_config.json"]["eos_token_id"]
            == [id_of(f.files["tokenizer.json"], "<|im_end|>"), f.config["eos_token_id"]]
        ),
        lambda f: f.files["generation_config.json"].update(eos_token_id=f.config["eos_token_id"]),
    ),
]

PEFT_HELPER = f"{VLLM}/lora/peft_helper.py"
ADAPTER_RULES = [
    Rule(
        "r, lora_alpha and target_modules are there",
        f"{PEFT_HELPER} (from_dict)",
        lambda f: {"r", "lora_alpha", "target_modules"} <= set(f.config),
        lambda f: f.config.pop("r"),
    ),
    Rule(
        "r and lora_alpha are whole numbers where they are",
        f"{PEFT_HELPER} (PEFTHelper)",
        lambda f: (type(f.config["r"]), type(f.config["lora_alpha"])) == (int, int),
        set_to(lora_alpha=16.0),
    ),
    Rule(
        "bias is none",
        f"{PEFT_HELPER} (validate_legal)",
        lambda f: f.config["bias"] == "none",
        set_to(bias="all"),
    ),
    Rule(
        "no module is saved whole",
        f"{PEFT_HELPER} (_validate_features)",
        lambda f: not f.config.get("modules_to_save"),
        set_to(modules_to_save=["lm_head"]),
    ),
    Rule(
        "it is neither DoRA nor scaled by the root of r",
        f"{PEFT_HELPER} (_validate_features)",
        lambda f: not f.config.get("use_dora") and not f.config.get("use_rslora"),
        set_to(use_dora=True),
    ),
    Rule(
        "r is no larger than the largest max_lora_rank",
        f"{VLLM}/config/lora.py (MaxLoRARanks)",
        lambda f: f.config["r"] <= max(VLLM_RANKS),
        set_to(r=1024),
    ),
    Rule(
        "its base is named",
        "https://docs.vllm.ai/en/latest/features/lora.html",
        lambda f: bool(f.config["base_model_name_or_path"]),
        set_to(base_model_name_or_path=None),
    ),
    Rule(
        "the file is adapter_model.safetensors",
        f"{VLLM}/lora/lora_model.py (from_local_checkpoint)",
        lambda f: "adapter_model.safetensors" in f.files,
        lambda f: f.files.pop("adapter_model.safetensors"),
    ),
    Rule(
        "each tensor is lora_A.weight or lora_B.weight of a layer that takes an adapter",
        f"{VLLM}/lora/utils.py (parse_fine_tuned_lora_name)",
        lambda f: all(
            name.startswith("base_model.model.model.layers.")
            and name.split(".")[-2:] in (["lora_A", "weight"], ["lora_B", "weight"])
            and name.split(".")[-3] in EXPECTED_MODULES
            for name in f.tensors
        ),
        lambda f: f.tensors.update({"base_model.model.lm_head.weight": (1,)}),
    ),
    Rule(
        "A has r rows and B has r columns",
        f"{VLLM}/lora/lora_weights.py",
        lambda f: all(
            f.config["r"] == shape[0 if ".lora_A." in name else 1]
            for name, shape in f.tensors.items()
        ),
        set_to(r=4),
    ),
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The export of a job with a tokenizer of Hugging Face and a template of its own."""
    tmp = tmp_path_factory.mktemp("chats")
    tokenizer = write_tokenizer(tmp / "tokenizer")
    end = id_of(json.loads((tokenizer / "tokenizer.json").read_text()), "<|end|>")
    (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (tmp / "mine.jinja").write_text(CHATML)
    model = random_decoder(replace(VARIANTS["grouped"], vocab_size=420))
    config = load_config(
        [
            f"--model.tokenizer_path={tokenizer}",
            "--model.name=llama3",
            "--model.flavor=tiny",
            "--model.vocab_size=420",
            "--training.dataset=synthetic_examples",
            f"--training.chat_template={tmp / 'mine.jinja'}",
        ]
    )
    settings = replace(describe_export(config, dtype=None), card=None)  # of a run that never was
    export(checkpoint_of(model, tmp / "step-1"), tmp / "out", settings=settings, group=None)
    return Folder.of(tmp / "out")


def model_folder(variant: str, path: Path, **more: Any) -> Folder:
    carried = carried_over(None, seq_len=64, eos_id=5)
    return Folder.of(exported(random_decoder(VARIANTS[variant]), path, carried=carried, **more))


def adapter_folder(variant: str, path: Path) -> Folder:
    return Folder.of(exported_adapter(variant, adapted(variant), path, alone=True))


def check(folder: Folder, rules: list[Rule]) -> None:
    broken = [f"{rule.says} ({rule.source})" for rule in rules if not rule.holds(folder)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 20_000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_keeps_the_rules(variant: str, max_file_bytes: int, tmp_path: Path) -> None:
    check(model_folder(variant, tmp_path, max_file_bytes=max_file_bytes), MODEL_RULES)


def test_a_model_for_chats_keeps_the_rules(chats: Folder) -> None:
    check(chats, [*MODEL_RULES, *CHAT_RULES])


@pytest.mark.parametrize("variant", ["grouped", "normed heads, tied", "biased", "window"])
def test_an_adapter_keeps_the_rules(variant: str, tmp_path: Path) -> None:
    check(adapter_folder(variant, tmp_path), ADAPTER_RULES)


def test_the_rules_can_fail(chats: Folder, tmp_path: Path) -> None:
    adapter = adapter_folder("grouped", tmp_path)
    cases = [(chats, rule) for rule in [*MODEL_RULES, *CHAT_RULES]]
    for folder, rule in [*cases, *((adapter, rule) for rule in ADAPTER_RULES)]:
        files = json.loads(json.dumps(folder.files))
        other = Folder(dict(folder.config), dict(folder.tensors), files)
        rule.breaks(other)
        assert not rule.holds(other), rule.says

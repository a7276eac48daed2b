"""The promise: a vision checkpoint that only mlx-vlm knows gives its language model, read without its vision weights."""

import copy
import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dspark.buffers.probe import prove
from dspark.checkpoints.load import load_model
from dspark.checkpoints.loaders import MlxLmLoader, pick_loader
from dspark.checkpoints.sources import resolve
from dspark.checkpoints.vlm import MlxVlmLoader, knows_mlx_vlm
from dspark.errors import CheckpointError
from dspark.models.target import Target
from dspark.stages.rollback import RollbackAuto
from tests.fakes import byte_tokenizer
from tests.speculation import drafted, plain, prompts

TEXT = {
    "model_type": "glm_ocr_text",
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0},
    "num_nextn_predict_layers": 0,
}
VISION = {
    "model_type": "glm_ocr_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
}
CONFIG = {
    "model_type": "glm_ocr",
    "vocab_size": 260,
    "text_config": TEXT,
    "vision_config": VISION,
    "eos_token_id": 256,
    "image_token_id": 257,
    "video_token_id": 258,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from mlx_vlm.models import glm_ocr

    path = tmp_path_factory.mktemp("vision")
    config = glm_ocr.ModelConfig.from_dict(copy.deepcopy(CONFIG))
    config.text_config = glm_ocr.TextConfig.from_dict(TEXT)
    config.vision_config = glm_ocr.VisionConfig.from_dict(VISION)
    model = glm_ocr.Model(config)
    mx.random.seed(0)
    weights = {k: mx.random.normal(v.shape) * 0.2 for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer()._tokenizer.save_pretrained(path)
    return path


def test_mlx_vlm_is_asked_only_for_what_mlx_lm_does_not_know(folder):
    assert isinstance(pick_loader(resolve(str(folder))), MlxVlmLoader)
    config = json.loads((folder / "config.json").read_text())
    assert knows_mlx_vlm(config)
    other = folder.parent / "text"
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (other / "model.safetensors").touch()
    assert isinstance(pick_loader(resolve(str(other))), MlxLmLoader)
    (other / "config.json").write_text(json.dumps({"model_type": "qwen9_vl"}))
    with pytest.raises(CheckpointError, match="'qwen9_vl' is none that the installed mlx-lm knows"):
        pick_loader(resolve(str(other)))


def test_the_language_model_is_decoded_as_it_speaks(folder):
    loaded = load_model(str(folder), dtype="float32")
    target = Target(loaded.model, loaded.config)
    assert type(target.core).__module__ == "mlx_vlm.models.glm_ocr.language"
    assert not any("vision" in name for name, _ in tree_flatten(target.core.parameters()))
    assert (target.vocab_size, target.context_length) == (260, 512)
    assert prove(target, RollbackAuto().plan(target)).worst < 1e-4
    asked = prompts(250, (9, 4))
    said = [plain(target, prompt, 20) for prompt in asked]
    assert len({token for row in said for token in row}) > 8
    assert drafted(target, asked, said, 20, 0.5) == said

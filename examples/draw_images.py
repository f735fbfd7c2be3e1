"""Draws images of coloured shapes with questions and answers, and the processor of a small LLaVA beside
them, for examples/images.yaml.

python examples/draw_images.py runs/images
"""

import json
import sys
from pathlib import Path

from own_submodels import COLOURS, PATCH, SHAPES, SIZE, draw
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

QUESTION = "what is it"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_rows(folder: Path, name: str, rows: int, seed: int) -> None:
    """A line for each image, and the images."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    drawn = draw(rows, seed)
    pixels = (drawn["pixel_values"].clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy()
    with (folder / f"{name}.jsonl").open("w") as file:
        for row, (colour, shape) in enumerate(drawn["input_ids"][:, -2:].tolist()):
            path = f"{name}/{row}.png"
            Image.fromarray(pixels[row]).save(folder / path)
            asked = [{"type": "image", "path": path}, {"type": "text", "text": QUESTION}]
            answer = f"{list(COLOURS)[colour]} {SHAPES[shape - len(COLOURS)]}"
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path) -> None:
    """Config, tokenizer and processor; the run draws the weights."""
    special = ["<pad>", "<image>", "<|user|>", "<|assistant|>", "<|end|>"]
    words = [*special, *QUESTION.split(), *COLOURS, *SHAPES]
    rust = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>", pad_token="<pad>")
    images = CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_rows(target, "train", 2000, seed=0)
    write_rows(target, "eval", 200, seed=1)
    write_model(target / "model")
    sys.stdout.write(f"2000 images to train on, 200 held out, and a processor are in {target}\n")

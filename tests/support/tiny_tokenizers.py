"""Tokenizers like those of BERT, RoBERTa, DeBERTa, Llama and Qwen2, learned from a few sentences in milliseconds."""

import re

from run_checkpoints import TEXTS
from tiny_checkpoints import save_tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB = 160
POSITIONS = 64
TYPES = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}  # what BERT's tokenizer returns
PLAIN_CHAT = "{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}"
CHATS = {  # as published checkpoints write them: with their special tokens or without
    "bert": PLAIN_CHAT,
    "roberta": "<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}",
    "deberta-v3": PLAIN_CHAT,
    "llama": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}",
    "qwen2": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
}
SPECIAL = {  # in the order of their ids
    "bert": {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    "roberta": {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    "deberta-v3": {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
    "llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "qwen2": {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
}
ADDED = {"bert": ("[CLS]", "[SEP]"), "roberta": ("<s>", "</s>"), "deberta-v3": ("[CLS]", "[SEP]"), "llama": ("<s>", "")}


def make_text_tokenizer(family, texts=TEXTS, *, added=None, **settings):
    """Return a tokenizer of `family` (a key of `CHATS`) that puts `added` around a text; default: the family's own."""
    special = [AddedToken(token, special=True) for token in SPECIAL[family].values()]
    tokenizer = _model(family, special, texts)
    tokenizer.add_special_tokens(special)
    around = [token for token in added or ADDED.get(family, ("", "")) if token]
    before, after = added or ADDED.get(family, ("", ""))
    if around:
        single = " ".join(filter(None, (before, "$A", after)))
        between = {"roberta": after, "llama": before}.get(family, "")
        second = [f"{token}:1" for token in (between, "$B", after) if token]
        ids = [(token, tokenizer.token_to_id(token)) for token in around]
        pair = " ".join([single, *second])
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **(TYPES if family in ("bert", "deberta-v3") else {}),
        **{"chat_template": CHATS[family], "model_max_length": POSITIONS, **SPECIAL[family], **settings},
    )


def save_text_reward(
    folder,
    family,
    *,
    seed=0,
    num_labels=1,
    model=None,
    **settings,
):
    """Save a random reward model of `family` with its tokenizer; return the tokenizer.

    Args:
        model: settings of the model's configuration.
        settings: arguments of `make_text_tokenizer`.
    """
    tokenizer = make_text_tokenizer(family, **settings)
    positions = POSITIONS + 2 if family == "roberta" else POSITIONS  # RoBERTa's positions start after its padding id
    config = {"vocab_size": VOCAB, "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": positions}
    save_tiny(folder, family, "reward", seed=seed, num_labels=num_labels, **{**config, **(model or {})})
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_chat_policy(folder, *, more=0, ends=None, seed=0, **settings):
    """Save a random policy with ChatML and its tokenizer; return the tokenizer.

    Args:
        more: number of embeddings that the tokenizer has no entry for.
        ends: `eos_token_id` of the generation config; default: the tokenizer's.
        settings: arguments of `make_text_tokenizer`, such as `eos_token`, which is <|im_end|>.
    """
    tokenizer = make_text_tokenizer("qwen2", **settings)
    ids = {"eos_token_id": tokenizer.eos_token_id if ends is None else ends, "bos_token_id": None}
    ids["pad_token_id"] = tokenizer.pad_token_id
    sizes = {"vocab_size": len(tokenizer) + more, "max_position_embeddings": POSITIONS}
    save_tiny(folder, "llama", "language", seed=seed, **sizes, **ids)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _model(family, special, texts):
    """Return the tokenizer without a post-processor; the same texts always give the same ids."""
    if family in ("bert", "deberta-v3"):  # the library's trainers give other ids each time
        texts = [text.lower() if family == "bert" else text for text in texts]
        letters = sorted(set("".join(texts)) - {" "})
        words = list(dict.fromkeys(word for text in texts for word in re.findall(r"\w+", text)))
        names = [token.content for token in special]
        if family == "bert":
            pieces = [*names, *letters, *(f"##{letter}" for letter in letters), *words][:VOCAB]
            tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
            tokenizer.normalizer = normalizers.BertNormalizer()
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            return tokenizer
        scores = {**dict.fromkeys(names, 0.0), "▁": -2.0, **dict.fromkeys(letters, -8.0)}
        scores.update({f"▁{word}": -4.0 for word in words})
        tokenizer = Tokenizer(models.Unigram(list(scores.items())[:VOCAB], unk_id=names.index("[UNK]")))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        return tokenizer
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if family == "llama" else None))
    if family == "llama":  # a text's first word gets a space, a word after a special token does not
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer

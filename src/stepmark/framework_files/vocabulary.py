"""The size of the vocabulary, which a tokenizer has, in Megatron-LM's arguments."""

from stepmark.framework_files.table import Keys

# Sizes of vocabularies that a type of tokenizer fixes.
_VOCABULARIES = {
    "GPT2BPETokenizer": "50257",
    "Llama2Tokenizer": "32000",
    "Llama3Tokenizer": "128256",
}
# Tokenizers that have --vocab-size.
_SIZED = ("NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer")


def prepare(keys: Keys) -> None:
    """Set the size of the vocabulary, which the tokenizer has unless it is a stand-in."""
    if padded := keys.pop("padded-vocab-size", ""):
        keys["vocab-size"] = padded
        keys["make-vocab-size-divisible-by"] = "1"
        return
    # GPT-2's alone has a file of merges, and is what pretrain_gpt.py has without a type.
    default = "GPT2BPETokenizer" if "merge-file" in keys else ""
    tokenizer = keys.get("tokenizer-type", default)
    size = keys.get("vocab-size", "")
    if vocabulary := _VOCABULARIES.get(tokenizer):
        if size not in ("", vocabulary):
            keys["vocab-size-of-another-tokenizer"] = size
        keys["vocab-size"] = vocabulary
    elif size and tokenizer not in ("", *_SIZED):
        keys["vocab-size-with-tokenizer"] = size

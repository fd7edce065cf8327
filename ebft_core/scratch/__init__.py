"""A base model made here: tokenizer, small Llama, cross-entropy training on text."""

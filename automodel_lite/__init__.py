"""automodel_lite: fine-tune Hugging Face causal language models on packed sequences in THD format."""

__version__ = "0.1.0"

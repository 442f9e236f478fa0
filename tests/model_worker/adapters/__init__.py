"""Tests of LoRA adapters: their files, and what models compute with them."""

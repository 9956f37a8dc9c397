"""The field of the metadata that pyproject.toml has no place for.

sentence-transformers and setfit take a distribution for this library only if `Home-page` holds the word "huggingface". It is
the address of the documentation of the interface that this library implements.
"""

from setuptools import setup

setup(url="https://huggingface.co/docs/accelerate")

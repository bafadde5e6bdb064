"""distflow: declarative distributed training on machines that you can SSH to."""

__all__ = ["__version__"]

__version__ = "0.2.0"

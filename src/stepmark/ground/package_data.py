"""Files of data that the package brings."""

from importlib.resources import files


def data_text(name: str) -> str:
    """Return the text of a file in the folder `data`."""
    return files("stepmark").joinpath("data", name).read_text(encoding="utf-8")

"""A file is replaced whole, and no link leads the writer astray."""

from pathlib import Path

import pytest

from skerry.runtime.files import replacing


def test_a_file_takes_the_place_of_a_link_and_not_of_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").symlink_to(tmp_path / "precious")
    with replacing(tmp_path / "out") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "out").read_text() == "new"
    assert not (tmp_path / "out").is_symlink()


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")

    def fail() -> None:
        with replacing(tmp_path / "out") as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]

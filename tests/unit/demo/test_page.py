"""The page and the picture that a person looks at."""

from __future__ import annotations

from pathlib import Path

from skerry_demo.page import write_page
from skerry_demo.picture import draw
from skerry_demo.summary import Evidence, summarise


def test_the_page_stands_alone_and_says_what_happened(evidence: Evidence, tmp_path: Path) -> None:
    summary = summarise(evidence)
    draw(evidence, summary, tmp_path / "demo.png")
    write_page(evidence, summary, picture=tmp_path / "demo.png", path=tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in page
    assert "http://" not in page
    assert "https://" not in page
    assert "SIGKILL for eu-west &lt;at&gt; its step 20" in page
    for name in ("merged_loss", "bits_per_parameter_up", "max_step_stall_ms", "deltas_named_unmerged"):
        assert name in page
    assert "2.500" in page

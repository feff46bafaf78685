"""Contents in memory stay within their bound."""

from skerry_syncer.store.versions.recent import SMALLEST_BYTES, RecentContents


def test_what_does_not_fit_is_left_out_and_the_oldest_goes_first() -> None:
    contents: RecentContents[str] = RecentContents(3 * SMALLEST_BYTES)
    contents.put("small", ["small"], SMALLEST_BYTES - 1)
    contents.put("large", ["large"], 3 * SMALLEST_BYTES + 1)
    for name in ("a", "b", "c", "d"):
        contents.put(name, [name], SMALLEST_BYTES)
    held = {name: list(contents.get(name)) for name in ("small", "large", "a", "b", "c", "d")}
    assert held == {"small": [], "large": [], "a": [], "b": ["b"], "c": ["c"], "d": ["d"]}
    assert (list(contents.take("c")), list(contents.take("c"))) == (["c"], [])
    contents.put("e", ["e"], SMALLEST_BYTES)
    assert (list(contents.get("b")), list(contents.get("e"))) == (["b"], ["e"])

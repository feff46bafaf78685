"""A field of the policy is stated once: few files have to know its name."""

from __future__ import annotations

from typing import Final

from tests.house.policy_fields import FILE_LIMIT, files_by_field

# The names `merge` and `outer` are words of the subject too, so their mentions say nothing.
_WORDS: Final = frozenset({"merge", "outer"})
# Fields that more files act on than the limit allows, with the number of files; it only falls.
_KNOWN: Final = {"inner_step_count": 27, "lease_term_s": 14, "merge_by_fragment": 9, "planned_step_count": 15}


def test_few_files_mention_a_field_of_the_policy() -> None:
    too_many = {
        field: files
        for field, files in files_by_field().items()
        if field not in _WORDS and len(files) > _KNOWN.get(field, FILE_LIMIT)
    }
    assert not too_many, f"over {FILE_LIMIT} files mention these fields: {too_many}"

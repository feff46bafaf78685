"""A browser for the tests of the console."""

from tests.support.browser import chromium, page

__all__ = ["chromium", "page"]

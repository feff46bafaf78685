"""Skerry over long and slow links: real processes in network namespaces of their own."""

"""Versions of a run as folders of Hugging Face's, each full or a delta against the one before, and how they are read.

The layout is that of slime, miles and SGLang (github.com/sgl-project/sglang/pull/30366):

    weight_v000001/   full: an ordinary checkpoint
    weight_v000002/   delta: the tensors that changed, each as zstd-compressed bytes (`deltas`)

Each folder has one safetensors file and `model.safetensors.index.json`, whose `metadata` have `version`, `position`,
`versions` of fragments, `run`, `uid`, `checksum_format` and `checksums` of all tensors; in a delta also `base_version`,
`delta_encoding` and `compression_format`.
"""

"""Triton kernels for the places where memory traffic, not arithmetic, decides.

One file per operation holds the mathematics, a plain torch reference and the dispatch; the file beside it
with `_triton` in its name holds the kernels. CUDA with Triton installed runs the kernel, anything else the
reference. Tests run the kernels on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`, set
before Triton is imported).

* `selective_logprob`: log-probabilities of chosen tokens from hidden states and head weight.
* `group_gram`: Gram matrices of a group's features from the hidden states of the feature layers.

The reduction of the REINFORCE loss has no kernel: it adds a few ten thousand numbers once per
micro-batch, and `docs/experiments.md` has the arithmetic.
"""

"""The decode engine: a model under a recipe generates text, on a CPU, or on a GPU from packed weights and CUDA graphs.

Proofs: in tests/engine test_engine.py and test_engine_equal.py on a CPU, test_engine_gpu.py on a GPU,
test_engine_sparse.py on both, and the last run of every prompt, chunk and batch on both in results/engine-equal.csv.

core.py      what an engine can be asked                     step.py    the plain step, its blocks and its cache
weights.py   packed and dense products, decoders             output.py  characters, stop strings, statistics
decoding.py  batches: prefill, steps, CUDA graphs            hosted.py  copies on the host, the next ones prefetched
copies.py    layers with a copy at each of several widths    precision.py  switching between them while decoding
order_file.py  what orders the layers, in a file             head_files.py  what is trained beside a model

A model that is larger than the memory it may use:

offload.py     streamed weights              speculate.py    draft trees, and what is accepted of them
substitute.py  a target and its draft        drafted.py      iterations with a draft
budget.py      what a budget holds           speculating.py  engines with a draft
limits.py      the limit on a GPU            traffic.py      when the bus copies
drafts.py      drafts that are models        ranked.py       dynamic trees
eagle.py       EAGLE-2's head and draft      shapes.py       shapes with random weights (shapes.yaml)

Engines by name are in repro/generation.
"""

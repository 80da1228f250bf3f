"""FlexQuant (arXiv 2506.12024): switch layers to fewer bits while decoding, once a window of tokens was certain.

config.py    the paper's settings, and one field with its reason for each thing that it leaves open
pple.py      the signal: perplexity entropy of a token's distribution
order.py     which layer is switched next: KL divergence of its weights, computed offline
schedule.py  when: the rule, the window, one-way switching, the log of switches and the mean bits that follow from it
"""

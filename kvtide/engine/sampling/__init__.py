"""From logits to the next token.

`sampling_params`  how a request's tokens are sampled
`sampler`          sampled tokens of a step's rows: penalties, biases, masks, top-k, top-p, noise
"""

"""What layers do, as programs of a CUDA device; each says which torch code gives the same.

Triton is imported in this folder and nowhere else among layers: only who has such a device needs
it. A layer imports a program where it calls it, if `Arithmetic.runs_programs`. All of them also
run in Triton's interpreter on a CPU, where tests compare them with the torch code.

`attention`         attention by head over pages
`attention_blocks`  which of its programs take which blocks of new tokens
`attention_single`  the same of single tokens, whose keys all programs share
`attention_prefix`  the same to what several sequences begin with
`attention_tiles`   tiles of keys, for all of these
`heads`             queries, keys and values from their projection to the pages
`shared`            attention of all heads over one vector a token: latents, blocks with a window
`tiles`             what `shared` is made of
`choosing`          an indexer's scores of entries, and its choice of them
`keeping`           entries into pages, packed and written at once
`turning`           norms and rotations of what comes out of a projection
`compressing`       the entries of blocks, and means under way
`streams`           several residual streams around a sublayer
`convolving`        causal convolutions, from and to running states
`scanning`          Mamba2's recurrence
`associating`       the gated delta rule: gated delta, and KDA
`gating`            the norm and the gate that close a recurrent layer
`experts`           mixtures of experts
`routing`           which experts a token goes to, and their shares
`rows`              norms, gates, the likeliest token: functions of single rows
`spans`             neighbouring tokens of a sequence, for programs that take several
`elementary`        functions of single elements
`compiling`         what they are compiled for: a model, and not a step
`sizes`             of tiles and grids
"""

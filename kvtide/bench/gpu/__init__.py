"""How fast models are served on a GPU, with the cache and without: random weights of real shapes.

`shapes`    which models, and weights for them
`bed`       an engine over one of them, and how long requests take
`ceilings`  what the machine can do: matrix products, its memory, its link
`restoring` the time to a first token, by where the prefix lies
`history`   a long history at random, for a model that only reads it
`speed`     prompts and single tokens, beside what they must compute and read
`costs`     what keeping pages costs those that are served
`turns`     many conversations over too little memory
`peer`      the same model in `transformers`
`plot`      the time to a first token as a picture
"""

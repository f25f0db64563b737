"""Training of EAGLE3 drafts (`kvtide draft train`): from prompts to a folder that `--draft` takes.

    prompts ─▶ generate: the target answers ─▶ features: its hidden states over the answers
                                                     │
    publish: the folder ◀─ held_out: accept length ◀─┴─ eagle3_training: the draft learns

`prompts`           prompts from text files, as the target takes them
`draft_shape`       a draft's shape: what its `config.json` says
`draft_vocabulary`  the target's tokens that a draft may predict
`generate`          the target's answers, by the engine
`features`          hidden states and greedy tokens over prompts and answers, by the engine
`trainable_eagle3`  the draft as a torch module; `starting_weights` gives it what the target knows
`batches`           sequences side by side, and what the target says of them
`eagle3_training`   the loss over several recurrent steps, and the loop
`held_out`          accept length on prompts that training has not seen
`publish`           the folder: `config.json` and `model.safetensors`
`time_budget`       when each part has to be done
`draft_training`    all of it, in order
`acceptance`        sampling: shared noise against rejection sampling
`evaluation`        a trained draft on other prompts (`kvtide draft evaluate`)
"""

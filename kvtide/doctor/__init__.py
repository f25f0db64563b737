"""What a machine can do, what is wrong with it, and how to serve a model on it.

`machine_facts`  what the system says: memory, limits, driver, GPUs
`probes`         what is measured: copies, allocation, GEMM, storage, layouts; each within its time
`judged_store`   the store that a server would use, and its speed
`model_facts`    what a model needs
`built_weights`  what its weights take as layers keep them
`advice`         the settings that fit, and the command that starts a server with them
`findings`       what is misconfigured, as sentences with remedies
"""

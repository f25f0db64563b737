"""The benchmarks of `kvtide bench` that have a file of their own, with arguments and tables.

`bench_gpu`        prefill, decode, TTFT by tier, multi-turn load, on a GPU
`bench_speculate`  decoding with drafts beside decoding without
`bench_sparse`     pools on the host with hot buffers, beside pages all on the device
`bench_handoff`    a server that prefills and one that decodes, beside one server
`bench_serve`      conversations over HTTP; `bench_agent` a session of tool calls
`bench_http`       conversations over HTTP beside the same on the engine alone
`bench_replay`     the planner's hit rates beside those of an engine
`bench_transfer`   page copies beside the link
`bench_storage`    a store beside its disk or its own library
`bench_codec`     codecs on a real model's pages, alone and in a store; KL of rounded ones
`bench_report`     rows of a long benchmark as they come
"""

"""`tokenyard bench`: measures any server that speaks OpenAI's API. The load generator of benchmarks/, too.

workload.py and datasets.py plan requests, client.py sends them, timeline.py is what one of them looked like, metrics.py
and results.py are the figures, levels.py runs one load after the other, page.py draws, and command.py is the command.
"""

"""The demo: three learners and a syncer as real processes, two of which are killed and restarted.

`plan` holds what is to happen, `scenario` runs it, `live` shows it, `history` reads the run's log, `judgement` measures
the models, `summary` computes the figures and checks, and `picture` and `page` present them.
"""

"""The demo: three islands and a syncer as real processes, two of them killed on the way, and an account of all of it.

`plan` says what shall happen, `scenario` makes it happen, `live` shows it, `ledger` reads what the run's log says of
it, `judgement` measures the models, `summary` puts the figures together, and `picture` and `page` show them.
"""

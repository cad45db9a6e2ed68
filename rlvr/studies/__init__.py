"""Studies: one config over seeds and variants, and statistics over the seeds. The command is `rlvr study`.

`study_plan` reads the command line into variants and runs and checks each variant's config; `study_folder` keeps the
specification and the lock; `study_runner` runs `rlvr train` in processes; `study_summary` reads what the runs left,
with the statistics of `seed_statistics`; `study_report` writes the table and the picture.

A study trains nothing itself: each run is the ordinary command in an ordinary run folder, so it resumes to the bit.
"""

SPECIFICATION = "study.json"  # the file that makes a folder a study's

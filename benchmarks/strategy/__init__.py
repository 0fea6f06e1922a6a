"""The suite `strategy`: trainings within OffloadStrategy beside plain Lightning's."""

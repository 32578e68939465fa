"""The tests, one room per part of the project; see README.md."""

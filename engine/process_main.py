"""The main function of an engine process: started by `engine.process`, never imported by it."""

from engine.build import build_engine
from engine.process_loop import serve


def main(file_descriptor: int) -> None:
    serve(file_descriptor, build_engine)

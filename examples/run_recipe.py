"""Run a recipe and print the answer as it comes. `python examples/run_recipe.py "Why is the sky blue?"`"""

import sys

import dspark


def main(prompt, engine=None, max_tokens=128):
    engine = engine or dspark.load("smollm2-135m").bind()
    with engine.open(prompt, max_tokens=max_tokens) as session:
        for commit in session:  # one a round
            print(commit.text, end="", flush=True)
    result = session.result
    print(f"\n{result.accepted_length:.2f} tokens a round, ended by {result.finish}")
    return result


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?")

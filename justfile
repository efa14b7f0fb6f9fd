# All commands of this repository, each of which stands by itself: `just --list`, `just test placement`.

# The list of commands
default:
    @just --list --unsorted

# Everything that has to hold before a change lands
check:
    .ci/run

# The tests of a crate: all, or those whose names contain a text
test crate *args:
    cargo test --locked --package {{ crate }} {{ args }}

# Formats all sources
format:
    cargo fmt --all

# The lints of a crate, as CI has them
lint crate:
    cargo clippy --locked --package {{ crate }} --all-targets --all-features -- -D warnings

# The scenarios: all, or one by its name
scenario *name:
    cargo run --package testbed -- e2e {{ if name == "" { "" } else { "--scenario " + name } }}

# The names, needs and promises of all scenarios
scenarios:
    cargo run --package testbed -- e2e --list

# The demo, until Ctrl-C
demo:
    cargo run --package testbed -- demo --keep

# Damaged inputs for everything that reads bytes from outside: seconds of each target, and targets by name
fuzz *args:
    .ci/fuzz {{ args }}

# The live page in Chromium
page:
    .ci/page

# The alerts and dashboards on a real Prometheus
prometheus:
    .ci/prometheus

# The chart with Helm's own engine, against kustomize
helm *args:
    .ci/helm {{ args }}

# Two builds of the images, compared byte for byte
images:
    .ci/images

# The scenarios on real Kubernetes with kind: all versions, or those named
cluster *versions:
    .ci/cluster {{ versions }}

# The oldest compiler that Cargo.toml admits
rust-version:
    .ci/rust-version

# The lints of GitHub's workflows
workflows:
    .ci/workflows

# The programs for real machines: target/release
build:
    cargo build --locked --release -p scheduler -p device-plugin -p cli --bins

# Writes the outputs in docs, and the list of all texts
documents:
    UPDATE_DOCUMENTS=1 cargo test --locked --package testbed --test main documents

# Writes the chart and the table of its values, from the folders of kustomize
chart:
    UPDATE_CHART=1 cargo test --locked --package testbed --test main deploy::chart

# Writes the snapshots of a crate
snapshots crate:
    INSTA_UPDATE=always cargo test --locked --package {{ crate }}

# Replays, load and plots; the help lists them
laboratory *args="--help":
    cargo run --release --package laboratory -- {{ args }}

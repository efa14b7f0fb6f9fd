# docker build -f deploy/docker/testbed.Dockerfile -t gpushare-testbed . && docker run --rm gpushare-testbed demo
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked -p testbed -p scheduler -p device-plugin --bins \
    && mkdir /out \
    && cp target/dist/testbed target/dist/gpushare-scheduler target/dist/gpushare-device-plugin /out/

FROM gcr.io/distroless/cc-debian12:nonroot
LABEL org.opencontainers.image.title="gpushare-testbed" \
      org.opencontainers.image.description="In-process Kubernetes to run gpushare without a cluster or a GPU" \
      org.opencontainers.image.licenses="Apache-2.0"
# In one directory: the testbed starts the daemons beside its own binary.
COPY --from=build /out/ /usr/local/bin/
COPY deploy/samples/ /gpushare/deploy/samples/
WORKDIR /gpushare
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/testbed"]
CMD ["demo"]

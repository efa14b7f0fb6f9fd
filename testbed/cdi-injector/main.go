// cdi-injector answers what containerd makes of a container's CDI devices: containerd's own code, with one cache for the
// process, whose directories are watched, and a refresh and an injection for each container.
//
//	cdi-injector SOCKET DIRECTORY[,DIRECTORY..]
//
// Later directories override earlier ones. Each line of a connection is a question, {"devices": ["gpushare.dev/gpu=x"]},
// and is answered by one line: what the container gets, or "error". `laboratory load injection` asks it in place of the
// testbed's model of a runtime. It is built for that measurement alone, inside a checkout of containerd 2.0 or later, whose
// vendored packages it uses:
//
//	mkdir CHECKOUT/cmd/cdi-injector && cp main.go CHECKOUT/cmd/cdi-injector/
//	cd CHECKOUT && go build -o cdi-injector ./cmd/cdi-injector
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	containerd "github.com/containerd/containerd/v2/pkg/cdi"
	"github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

type question struct {
	Devices []string `json:"devices"`
}

type answer struct {
	Env         []string   `json:"env"`
	DeviceNodes []string   `json:"deviceNodes"`
	Mounts      []string   `json:"mounts"`
	Hooks       [][]string `json:"hooks"`
	Error       string     `json:"error,omitempty"`
}

func main() {
	if len(os.Args) != 3 {
		fail(errors.New("usage: cdi-injector SOCKET DIRECTORY[,DIRECTORY..]"))
	}
	// containerd configures the cache of the process once, when its CRI plugin starts.
	if err := cdi.Configure(cdi.WithSpecDirs(strings.Split(os.Args[2], ",")...)); err != nil {
		fail(err)
	}
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		fail(err)
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			fail(err)
		}
		go serve(connection)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "cdi-injector:", err)
	os.Exit(1)
}

func serve(connection net.Conn) {
	defer connection.Close()
	lines := bufio.NewReader(connection)
	answers := json.NewEncoder(connection)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var asked question
		if err := json.Unmarshal(line, &asked); err != nil {
			fmt.Fprintln(os.Stderr, "cdi-injector: not a question:", err)
			return
		}
		if err := answers.Encode(inject(asked.Devices)); err != nil {
			return
		}
	}
}

func inject(devices []string) answer {
	container := &specs.Spec{}
	if err := containerd.WithCDIDevices(devices...)(context.Background(), nil, nil, container); err != nil {
		return answer{Error: err.Error()}
	}
	var made answer
	if container.Process != nil {
		made.Env = container.Process.Env
	}
	if container.Linux != nil {
		for _, device := range container.Linux.Devices {
			made.DeviceNodes = append(made.DeviceNodes, device.Path)
		}
	}
	for _, mount := range container.Mounts {
		made.Mounts = append(made.Mounts, mount.Destination)
	}
	if hooks := container.Hooks; hooks != nil {
		all := append(append(hooks.CreateRuntime, hooks.CreateContainer...), hooks.StartContainer...)
		for _, hook := range all {
			made.Hooks = append(made.Hooks, hook.Args)
		}
	}
	return made
}
